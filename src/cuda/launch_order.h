#pragma once

#include <vector>

#include "cuda/context.h"
#include "cuda/early_reads.h"

namespace gyre::cuda {

// What the command's kernel is launched with. Refuses what cannot be launched.
Launch launch_of(const CommandList& list, const Command& command, const CudaLimits& limits);
// As CudaKernel has it.
bool launches_first(const Command& command);

// How the launches of a list follow each other on one stream: each may begin before the one ahead
// has ended where its kernel waits by itself (pdl_wait). Made before the first launch: between two
// of them nothing may fail for want of memory.
struct LaunchOrder {
  struct Step {
    bool overlaps = false;  // begins early
    EarlyReads early;
  };
  std::vector<Step> steps;  // of each command
  RunningWrites running;    // for what follows the list

  // `pdl`: whether the GPU can begin early. `behind_kernel`: a kernel is ahead of the list, beside
  // `beside`.
  LaunchOrder(const CommandList& list, const CudaLimits& limits, bool pdl, bool behind_kernel,
              RunningWrites beside);
};

}  // namespace gyre::cuda
