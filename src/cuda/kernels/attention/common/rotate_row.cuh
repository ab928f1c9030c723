#pragma once
// Into and out of the domain in which a compressed format stores a head, one warp to a row in
// shared memory: signs, then the orthonormal Walsh-Hadamard transform of each power-of-two block.
#include "abi/kv_codec.h"
#include "cuda/kernels/ptx.cuh"

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

}  // namespace gyre::cuda
