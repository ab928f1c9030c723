#pragma once
// Rows of K, of levels, in shared memory as they are stored: which words a step's codes are in.
#include "cuda/kernels/attention/common/unpack.cuh"

namespace gyre::cuda {

// A step's codes of one key, for a head_dim that every plane of K has whole groups of. Loaded apart
// from unpacking, so that several loads may be on their way.
template <uint32_t kK>
struct KeyWords {
  static constexpr uint32_t kLow = abi::kv_low_bits(kK), kHigh = abi::kv_high_bits(kK);
  uint32_t low, next = 0, high = 0;

  KeyWords() = default;
  KeyWords(const uint8_t* row, uint32_t n, uint32_t step, uint32_t j) {
    constexpr uint32_t kGroup = abi::kv_group(kLow),
                       kHighGroup = abi::kv_group(kHigh == 0 ? 1 : kHigh);
    const uint32_t word = key_word<kK>(step);
    const auto* const words = reinterpret_cast<const uint32_t*>(row + word * 16) + j;
    low = words[0];
    if constexpr (kK == abi::kTq8) next = words[4];
    if constexpr (kHigh != 0) {
      const uint8_t* const plane = row + n * kLow / 8;
      high = reinterpret_cast<const uint32_t*>(plane + word * kGroup / kHighGroup * 16)[j] >>
             (word * kGroup % kHighGroup / 16 * kHigh);
    }
  }
  Operands<1> operands(const LevelTable& table, uint32_t step) const {
    return unpack_key<kK, true>(table, low, next, high, step);
  }
};

}  // namespace gyre::cuda
