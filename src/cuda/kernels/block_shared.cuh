#pragma once
// What the threads of a block, and of a cluster, share: memory and barriers.
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

// Compiled for racecheck, all lanes arrive: it does not see that one does so for its warp.
// docs/notes/racecheck-many-rows.md.
#if defined(GYRE_RACECHECK)
constexpr bool kForRacecheck = true;
#else
constexpr bool kForRacecheck = false;
#endif
constexpr uint32_t kWarpArrivals = kForRacecheck ? kWarp : 1;
// Arrives for a warp, behind what all of its lanes did.
inline void arrive_warp(PhaseBarrier* barrier) {
  __syncwarp();
  if (kForRacecheck || threadIdx.x % kWarp == 0) arrive(barrier);
}

}  // namespace gyre::cuda
