#pragma once
#include "abi/types.h"

namespace gyre::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// The `lane`-th lane's x. All lanes of the warp together.
__device__ inline uint64_t shuffled(uint64_t x, uint32_t lane) {
  const uint32_t low = __shfl_sync(kAll, static_cast<uint32_t>(x), static_cast<int>(lane));
  const uint32_t high = __shfl_sync(kAll, static_cast<uint32_t>(x >> 32), static_cast<int>(lane));
  return uint64_t{high} << 32 | low;
}

// The sum of x over the lanes up to this one. All lanes of the warp together.
template <class T>
__device__ T scan_warp(T x) {
  const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
  for (uint32_t by = 1; by < kWarp; by *= 2) {
    const T other = __shfl_up_sync(kAll, x, by);
    if (lane >= by) x += other;
  }
  return x;
}

}  // namespace gyre::cuda
