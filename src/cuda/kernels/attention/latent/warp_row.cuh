#pragma once
// A row of numbers in a warp's registers: lane l has those at 32 i + l.
#include "abi/kv_codec.h"
#include "cuda/kernels/attention/common/query_values.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

template <uint32_t kDim>
struct WarpRow {
  static constexpr uint32_t kCount = (kDim + kWarp - 1) / kWarp;
  float x[kCount] = {};

  static uint32_t place(uint32_t i) { return i * kWarp + threadIdx.x % kWarp; }
  static bool has(uint32_t i) { return kDim % kWarp == 0 || place(i) < kDim; }

  void flip_signs() {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i)
      if (abi::kv_sign_bit(place(i)) != 0) x[i] = -x[i];
  }
  // The orthonormal Walsh-Hadamard transform of a power of two.
  void transform() {
#pragma unroll
    for (uint32_t h = 1; h < kWarp && h < kDim; h *= 2) {
      const float sign = (threadIdx.x & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i)
        x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAll, x[i], static_cast<int>(h)));
    }
#pragma unroll
    for (uint32_t h = 1; h < kCount; h *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        if ((i & h) != 0) continue;
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] *= inverse_root(kDim);
  }
  // The largest magnitude as bits: numbers that are not finite have the largest. Of the lane.
  uint32_t largest_bits() const {
    uint32_t max_bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t magnitude = has(i) ? __float_as_uint(x[i]) & 0x7FFFFFFFu : 0;
      max_bits = magnitude > max_bits ? magnitude : max_bits;
    }
    return max_bits;
  }
};

}  // namespace gyre::cuda
