#pragma once
// Into and out of the domain in which a compressed format stores a head: signs, then the
// orthonormal Walsh-Hadamard transform of each power-of-two block. One warp to a row, in shared
// memory or in registers.
#include "abi/kv_codec.h"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// Stages 4, 8, ... n / 2, 1, 2, as the codec has them, without the factor 1 / sqrt(n).
inline void hadamard_stage(float* x, uint32_t n, uint32_t h) {
  for (uint32_t i = threadIdx.x % kWarp; i < n / 2; i += kWarp) {
    const uint32_t at = (i & ~(h - 1)) * 2 + (i & (h - 1));
    const float a = x[at], b = x[at + h];
    x[at] = a + b;
    x[at + h] = a - b;
  }
  __syncwarp();
}

inline void hadamard(float* x, uint32_t n) {
  for (uint32_t h = 4; h < n; h *= 2) hadamard_stage(x, n, h);
  hadamard_stage(x, n, 1);
  hadamard_stage(x, n, 2);
}

inline void transform_blocks(float* x, uint32_t head_dim) {
  for (uint32_t size = abi::kKvMaxHeadDim, begin = 0; size != 0; size /= 2) {
    if ((head_dim & size) == 0) continue;
    hadamard(x + begin, size);
    const float factor = 1.0f / sqrtf(static_cast<float>(size));
    for (uint32_t i = threadIdx.x % kWarp; i < size; i += kWarp) x[begin + i] *= factor;
    __syncwarp();
    begin += size;
  }
}

// mlx-native's table has signs at 256 and 512 only.
inline bool flips(uint32_t format, uint32_t head_dim, uint32_t coordinate) {
  if (abi::kv_is_native(format)) return abi::kv_sign_bit(coordinate) != 0;
  if (head_dim != 256 && head_dim != 512) return false;
  return (abi::kMlxNativeSigns[coordinate / 8] >> (coordinate % 8) & 1) != 0;
}

inline void flip_signs(float* x, uint32_t format, uint32_t head_dim) {
  for (uint32_t i = threadIdx.x % kWarp; i < head_dim; i += kWarp) {
    if (flips(format, head_dim, i)) x[i] = -x[i];
  }
  __syncwarp();
}

template <uint32_t kFormat>
inline void rotate(float* x, uint32_t head_dim) {
  if constexpr (abi::kv_is_native(kFormat) || abi::kv_is_mlx_native(kFormat)) {
    flip_signs(x, kFormat, head_dim);
    transform_blocks(x, head_dim);
  }
}

template <uint32_t kFormat>
inline void restore(float* x, uint32_t head_dim) {
  if constexpr (abi::kv_is_native(kFormat) || abi::kv_is_mlx_native(kFormat)) {
    transform_blocks(x, head_dim);
    flip_signs(x, kFormat, head_dim);
  }
}

// Hadamard stages 32, 64, ... in a lane's registers, 1 to 16 between lanes; lane i has coordinates
// i + 32 c. 16 coordinates are those of the first 16 lanes.
template <uint32_t kDim>
inline void hadamard_lanes(uint32_t lane, float (&x)[(kDim + kWarp - 1) / kWarp]) {
#pragma unroll
  for (uint32_t h = 1; h < kDim / kWarp; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kDim / kWarp; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b, x[i + h] = a - b;
    }
  }
#pragma unroll
  for (uint32_t h = 1; h < (kDim < kWarp ? kDim : kWarp); h *= 2) {
    const float sign = (lane & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < (kDim + kWarp - 1) / kWarp; ++i)
      x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAll, x[i], static_cast<int>(h)));
  }
}

// Signs of coordinates first to first + 31, a bit each.
constexpr uint32_t sign_bits(uint32_t first) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < kWarp; ++i) bits |= (abi::kv_sign_bit(first + i) != 0 ? 1u : 0u) << i;
  return bits;
}

// Multiplies by the signs of coordinates from kFirst on, and by a factor.
template <uint32_t kFirst, uint32_t kAt = 0, uint32_t kPerLane>
inline void flip_lanes(uint32_t lane, float factor, float (&x)[kPerLane]) {
  constexpr uint32_t kSigns = sign_bits(kFirst + kAt * kWarp);
  x[kAt] *= (kSigns >> lane & 1u) != 0 ? -factor : factor;
  if constexpr (kAt + 1 < kPerLane) flip_lanes<kFirst, kAt + 1>(lane, factor, x);
}

// A warp rotates 256 coordinates, of a row of kBlocks times as many: the whole row goes in, one
// block comes out.
template <uint32_t kBlocks, uint32_t kPerLane>
inline void hadamard_block(const float (&x)[kPerLane], uint32_t block, uint32_t lane,
                           float (&y)[kPerLane / kBlocks]) {
  static_assert(kBlocks <= 2);
  constexpr uint32_t kHalf = kPerLane / kBlocks;
#pragma unroll
  for (uint32_t i = 0; i < kHalf; ++i) {
    y[i] = x[i];
    if constexpr (kBlocks == 2) y[i] = block == 0 ? x[i] + x[i + kHalf] : x[i] - x[i + kHalf];
  }
  hadamard_lanes<kHalf * kWarp>(lane, y);
}

}  // namespace gyre::cuda
