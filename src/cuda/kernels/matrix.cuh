#pragma once
// Rows times a matrix that says what each coordinate adds: sums are chains over coordinates in
// order, so that every device has the same bits.
#include "cuda/kernels/global_memory.cuh"

namespace gyre::cuda {

// Asks for all of an n x n matrix, which the whole block reads next. Without it a chain waits for
// one batch of loads after the other.
__device__ inline void prefetch_matrix(const float* matrix, uint32_t n) {
  constexpr uint32_t kLine = 128 / sizeof(float);
  if (matrix == nullptr || n > 128) return;  // more than an L1 holds
#pragma unroll 1
  for (uint32_t i = threadIdx.x * kLine; i < n * n; i += blockDim.x * kLine) prefetch(matrix + i);
}

// Coordinate i of the product, from the first `count` coordinates of x.
__device__ inline float product(const float* matrix, const float* x, uint32_t n, uint32_t i,
                                uint32_t count) {
  float sum = 0;
#pragma unroll 16
  for (uint32_t j = 0; j < count; ++j) sum = __fmaf_rn(matrix[j * n + i], x[j], sum);
  return sum;
}

}  // namespace gyre::cuda
