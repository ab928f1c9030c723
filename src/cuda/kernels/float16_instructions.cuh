#pragma once
// Conversions of 16-bit floats by one instruction each: nearest, ties to even.
#include "abi/types.h"

namespace gyre::cuda {

// NaN becomes any NaN.
inline float widen_f16(uint16_t bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}
inline uint16_t round_f16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// Two, the first in the lower half; NaN becomes 0x7E00.
inline uint32_t round_f16x2(float low, float high) {
  uint32_t pair, nan;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  asm("set.nan.u32.f16x2 %0, %1, %1;" : "=r"(nan) : "r"(pair));
  return pair & ~(nan & 0x01FF01FFu);  // the conversion has 0x7FFF
}
// Two of either type, the first in the lower half; NaN becomes any NaN.
inline uint32_t pack_16(float a, float b, bool bf16) {
  uint32_t x;
  if (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
  }
  return x;
}

}  // namespace gyre::cuda
