#pragma once
// Rows times a matrix that says what each coordinate adds: sums are chains over coordinates in
// order, so that every device has the same bits.
#include "cuda/kernels/global_memory.cuh"

namespace gyre::cuda {

constexpr uint32_t kLineFloats = 128 / sizeof(float);

// Before pdl_wait(): an n x n matrix comes nearer while the kernel ahead still runs. Whoever writes
// the matrix may be that kernel; the L2 has what it writes.
__device__ inline void prefetch_matrix(const float* matrix, uint32_t n) {
  if (matrix == nullptr) return;
#pragma unroll 1
  for (uint32_t i = threadIdx.x * kLineFloats; i < n * n; i += blockDim.x * kLineFloats)
    prefetch_l2(matrix + i);
}

// Coordinate i of the product, from the first `count` coordinates of x, behind `sum`.
__device__ inline float product(const float* matrix, const float* x, uint32_t n, uint32_t i,
                                uint32_t count, float sum = 0) {
#pragma unroll 32
  for (uint32_t j = 0; j < count; ++j) sum = __fmaf_rn(matrix[j * n + i], x[j], sum);
  return sum;
}

// kCount consecutive numbers; kWide: their address is a multiple of 16.
template <bool kWide, uint32_t kCount>
__device__ void load_entries(const float* from, float (&x)[kCount]) {
  if constexpr (kWide) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] = from[i];
  }
}

}  // namespace gyre::cuda
