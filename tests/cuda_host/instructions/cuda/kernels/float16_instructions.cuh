#pragma once
// src/cuda/kernels/float16_instructions.cuh in C++.
#include "abi/types.h"

namespace gyre::cuda {

inline float widen_f16(uint16_t bits) {
  const uint32_t sign_bit = (bits & 0x8000u) << 16, half = bits & 0x7FFFu;
  float result = half < 0x400u ? static_cast<float>(half) * 0x1p-24f
                               : __uint_as_float((half << 13) + 0x38000000u);
  if (half >= 0x7C00u) result = __uint_as_float(half == 0x7C00u ? 0x7F800000u : 0x7FC00000u);
  return __uint_as_float(__float_as_uint(result) | sign_bit);
}
inline uint16_t round_f16(float value) {
  const uint32_t pattern = __float_as_uint(value), magnitude = pattern & 0x7FFFFFFFu;
  uint32_t rounded = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  if (magnitude < 0x38800000u) {
    rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u;
  } else if (magnitude < 0x47800000u) {
    rounded = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  const uint32_t sign = magnitude > 0x7F800000u ? 0 : pattern >> 16 & 0x8000u;
  return static_cast<uint16_t>(sign | rounded);
}
inline uint32_t round_f16x2(float low, float high) {
  return round_f16(low) | static_cast<uint32_t>(round_f16(high)) << 16;
}
inline uint32_t pack_16(float a, float b, bool bf16) {
  const auto round_bf16 = [](float x) -> uint32_t {
    const uint32_t pattern = __float_as_uint(x);
    if ((pattern & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
    return (pattern + 0x7FFFu + (pattern >> 16 & 1u)) >> 16;
  };
  return bf16 ? round_bf16(a) | round_bf16(b) << 16 : round_f16x2(a, b);
}

}  // namespace gyre::cuda
