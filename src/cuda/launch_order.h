#pragma once

#include <vector>

#include "cuda/context.h"
#include "cuda/early_reads.h"

namespace gyre::cuda {

// What the command's kernel is launched with. Refuses what cannot be launched.
Launch launch_shape(const CommandList& list, const Command& command, const CudaLimits& limits);
// Whether the kernel waits for those ahead of it by itself (pdl_wait): kernels of the tables do, a
// user's own kernel does not.
bool waits_by_itself(const Command& command);
bool launches_first(const Command& command);  // CudaKernel::launches_first

// How the launches of a list follow each other on one stream: a kernel that waits by itself may
// begin before the one ahead has ended. Made before the first launch: between two of them nothing
// may fail for want of memory.
struct LaunchOrder {
  struct Step {
    bool overlaps = false;  // begins early
    EarlyReads early;
  };
  std::vector<Step> steps;  // of each command
  RunningWrites running;    // for what follows the list

  // `pdl`: whether the GPU can begin early. `behind_kernel`: a kernel is ahead of the list and may
  // still run when it begins. `beside`: what is written meanwhile.
  LaunchOrder(const CommandList& list, const CudaLimits& limits, bool pdl, bool behind_kernel,
              RunningWrites beside);
};

}  // namespace gyre::cuda
