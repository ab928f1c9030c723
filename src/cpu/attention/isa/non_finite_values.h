#pragma once
// Values that are not finite, for kernels that multiply rows with values which some of them do not
// see: 0 times such a value would be NaN, so that the operand has zeros in their place. Anonymous:
// each file has its own copy.

#include <cstring>

#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {
namespace {

// Sizes, as stored without the sign, from which on f16 and bf16 are not finite.
constexpr uint16_t kHalfLimit = 0x7C00, kBf16Limit = 0x7F80;

// Adds them to the rows that see them. to_float makes a float of what is stored.
template <class ToFloat>
inline void add_non_finite_values(const AccumulateJob& job, uint16_t limit,
                                  const ToFloat& to_float) {
  for (size_t key = job.begin; key < job.end; ++key) {
    for (size_t c = 0; c < job.head_dim; ++c) {
      uint16_t stored = 0;
      std::memcpy(&stored, job.values + key * job.value_stride + 2 * c, 2);
      if ((stored & 0x7FFF) < limit) continue;
      for (size_t r = 0; r < job.rows; ++r) {
        const float p = job.p[r * kBlockKeys + key];
        if (p != 0) job.acc[r * job.head_dim + c] += p * to_float(stored);
      }
    }
  }
}

}  // namespace
}  // namespace gyre::cpu
