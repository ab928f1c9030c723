#pragma once

#include "gyre_test.h"

namespace gyre::test {

// Every f32 at which rounding to `narrow` changes its mind, with its neighbours, and the special
// values.
std::vector<uint32_t> rounding_boundaries(DType narrow);
std::vector<uint32_t> all_16_bit_patterns();

}  // namespace gyre::test
