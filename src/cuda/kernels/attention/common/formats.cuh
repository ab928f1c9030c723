#pragma once
// Formats of K and V as kernels count them, sizes in shared memory that depend on them, and where
// scratch begins. Constants, for the host and the kernels alike.
#include "abi/kv_codec.h"

namespace gyre::cuda {

constexpr uint32_t kFormatF32 = 0, kFormatF16 = 1, kFormatBf16 = 2;  // KvFormat

constexpr bool is_float16_format(uint32_t format) {
  return format == kFormatF16 || format == kFormatBf16;
}
// Formats that go through shared memory as they are stored.
constexpr bool is_staged(uint32_t format) {
  return abi::kv_is_native(format) || is_float16_format(format);
}

constexpr uint32_t round_up(uint32_t x, uint32_t to) { return (x + to - 1) / to * to; }
// The next multiple of 16 that leaves `modulus` modulo `of`: where rows begin decides bank
// conflicts.
constexpr uint32_t padded(uint32_t bytes, uint32_t of, uint32_t modulus) {
  return round_up(bytes + of - modulus, of) - of + modulus;
}

constexpr uint32_t count_scale_blocks(uint32_t head_dim) {
  uint32_t count = 0;
  for (uint32_t size = 8; size <= abi::kKvMaxHeadDim; size *= 2) {
    if ((head_dim & size) != 0) count += size > abi::kKvScaleBlock ? size / abi::kKvScaleBlock : 1;
  }
  return count;
}

// Coordinates of K that one word of each of four lanes holds, of levels: one or two MMA steps.
constexpr uint32_t key_span(uint32_t format) { return abi::kv_low_bits(format) == 2 ? 64 : 32; }

// A call's counters come first in its scratch memory, 0 before and after it. What else a call
// writes there begins at the same place for all kernels of a GPU, linear or over pages: calls of
// other shapes that use the same memory leave the counters alone.
constexpr uint64_t paged_counter_bytes(uint32_t blocks) {
  const uint64_t bytes = (uint64_t{blocks} * 4 + 127) / 128 * 128;
  return bytes > abi::kScratchCounterBytes ? bytes : abi::kScratchCounterBytes;
}

}  // namespace gyre::cuda
