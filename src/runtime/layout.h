#pragma once

#include <cstdint>

#include "gyre/tensor.h"
#include "runtime/internals.h"
#include "runtime/storage.h"

namespace gyre {

// All refuse what does not fit in 63 bits; `what` opens the message.
uint64_t checked_elements(const char* what, const Dims& shape);
uint64_t checked_bytes(const char* what, DType dtype, const Dims& shape);
// Elements from the first to one past the last that shape and strides reach; 0 for an empty shape.
uint64_t checked_extent(const char* what, const Dims& shape, const Dims& strides);

Dims contiguous_strides(const Dims& shape);

// True if no two positions share an element. Sufficient, not necessary: strides must nest.
bool strides_nest(const Dims& shape, const Dims& strides);

// Same elements in the same places: an in-place call.
bool is_same_view(const Tensor& a, const Tensor& b);

// Exact for tensors that lie side by side in the rows of one buffer, and for tensors of equal
// strides and dtype whose strides nest around the larger size of each dimension; true otherwise.
bool grids_may_meet(const Tensor& a, const Tensor& b);

// True if the two tensors may share a byte. By byte range, and exact for tensors that interleave in
// one buffer (K and V side by side). Both must be defined.
inline bool may_overlap(const Tensor& a, const Tensor& b) {
  const uint64_t a_begin = storage_of(a)->address() + a.byte_offset();
  const uint64_t b_begin = storage_of(b)->address() + b.byte_offset();
  if (a_begin >= b_begin + b.span_bytes() || b_begin >= a_begin + a.span_bytes()) return false;
  return a.elements() != 0 && b.elements() != 0 && grids_may_meet(a, b);
}

}  // namespace gyre
