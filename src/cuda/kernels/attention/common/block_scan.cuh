#pragma once
// A prefix sum over the threads of a block.
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// The sum of what the threads before have, and of all threads. `of_warps`: a word for each warp, in
// shared memory. For all threads together.
inline uint64_t scan_block(uint64_t value, uint64_t* of_warps, uint64_t& all) {
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const uint64_t sum = scan_warp(value);
  if (lane == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  all = 0;
  for (uint32_t w = 0; w < warps; ++w) {
    if (w == warp) before = all;
    all += of_warps[w];
  }
  __syncthreads();
  return before + sum - value;
}

}  // namespace gyre::cuda
