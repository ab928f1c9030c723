#pragma once
#include "cuda/kernels/convert.cuh"

namespace gyre::cuda {

// Two 16-bit floats, the first in the lower half.
inline uint32_t pack_16(float a, float b, bool bf16) {
#if defined(GYRE_CUDA_HOST)
  return bf16 ? from_float<BFloat16>(a).bits | static_cast<uint32_t>(from_float<BFloat16>(b).bits)
                                                   << 16
              : from_float<Half>(a).bits | static_cast<uint32_t>(from_float<Half>(b).bits) << 16;
#else
  uint32_t x;
  if (bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
  }
  return x;
#endif
}

}  // namespace gyre::cuda
