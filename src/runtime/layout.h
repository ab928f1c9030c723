#pragma once

#include <cstdint>

#include "gyre/tensor.h"

namespace gyre {

// Both refuse what does not fit in 63 bits; `what` opens the message.
uint64_t checked_elements(const char* what, const Dims& shape);
// Elements from the first to one past the last that shape and strides reach; 0 for an empty shape.
uint64_t checked_extent(const char* what, const Dims& shape, const Dims& strides);

Dims contiguous_strides(const Dims& shape);

// True if no two positions share an element. Sufficient, not necessary: strides must nest.
bool is_injective(const Tensor& tensor);

// True if the two tensors may share a byte. Exact for tensors of equal shape, strides and dtype whose
// strides nest (K and V interleaved in one buffer), by byte range otherwise.
bool may_overlap(const Tensor& a, const Tensor& b);

}  // namespace gyre
