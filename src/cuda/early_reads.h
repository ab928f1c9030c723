#pragma once
// What the kernels of a graph may read before pdl_wait: arguments that no command which may still
// run at that time writes.

#include <cstddef>
#include <cstdint>

#include "runtime/command_list.h"

namespace gyre::cuda {

// A bit for each argument, as Args has them. The default is right where a command starts after all
// others have ended.
struct EarlyReads {
  uint32_t unwritten = ~0u;
  uint32_t old = ~0u;
};

// Which commands may still run when a node of a graph starts: those from first_running on.
struct PdlStart {
  size_t command = 0;
  size_t first_running = 0;
  bool launches_first = false;  // as CudaKernel has it

  PdlStart() = default;
  // All others have ended.
  explicit PdlStart(size_t index) : command(index), first_running(index) {}
  // A node that follows this one by a programmatic edge. It starts when all blocks of this one have
  // called pdl_launch_dependents; where they call it after pdl_wait, nothing older is left.
  PdlStart follow(size_t index) const {
    PdlStart next(index);
    next.first_running = launches_first ? first_running : command;
    return next;
  }
};

EarlyReads early_reads(const CommandList& list, const PdlStart& start);

}  // namespace gyre::cuda
