#pragma once
// 32-bit words from and to addresses of any alignment, as wide as it allows.
#include "abi/types.h"

namespace gyre::cuda {

__device__ inline bool is_aligned(const void* at, uint32_t bytes) {
  return (reinterpret_cast<uint64_t>(at) & (bytes - 1)) == 0;
}

// Says that an address is a multiple of 16: what is asked about it further on is decided.
__device__ inline uint8_t* assume_wide(uint8_t* at) {
  __builtin_assume((reinterpret_cast<uint64_t>(at) & 15) == 0);
  return at;
}

template <uint32_t kWords>
__device__ void load_words(const uint8_t* from, uint32_t (&words)[kWords]) {
  if (kWords % 4 == 0 && is_aligned(from, 16)) {
#pragma unroll
    for (uint32_t i = 0; i + 3 < kWords; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + 4 * i);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if (kWords % 2 == 0 && is_aligned(from, 8)) {
#pragma unroll
    for (uint32_t i = 0; i + 1 < kWords; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from + 4 * i);
      words[i] = two.x, words[i + 1] = two.y;
    }
  } else if (is_aligned(from, 4)) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i)
      words[i] = *reinterpret_cast<const uint32_t*>(from + 4 * i);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
      words[i] = 0;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        words[i] |= static_cast<uint32_t>(from[4 * i + j]) << (8 * j);
    }
  }
}

template <uint32_t kWords>
__device__ void store_words(const uint32_t (&words)[kWords], uint8_t* to) {
  if (kWords % 4 == 0 && is_aligned(to, 16)) {
#pragma unroll
    for (uint32_t i = 0; i + 3 < kWords; i += 4)
      *reinterpret_cast<uint4*>(to + 4 * i) =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  } else if (kWords % 2 == 0 && is_aligned(to, 8)) {
#pragma unroll
    for (uint32_t i = 0; i + 1 < kWords; i += 2)
      *reinterpret_cast<uint2*>(to + 4 * i) = make_uint2(words[i], words[i + 1]);
  } else if (is_aligned(to, 4)) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) *reinterpret_cast<uint32_t*>(to + 4 * i) = words[i];
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 4 * kWords; ++i)
      to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

// From shared memory, at a multiple of as many bytes.
template <uint32_t kWords>
inline void load_shared_words(const unsigned char* from, uint32_t* w) {
  if constexpr (kWords >= 4) {
#pragma unroll
    for (uint32_t i = 0; i < kWords / 4; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    w[0] = x.x, w[1] = x.y;
  } else if constexpr (kWords == 1) {
    w[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

}  // namespace gyre::cuda
