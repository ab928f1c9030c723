#pragma once
// What kernels may read before pdl_wait: arguments that no command which may still
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

// Which commands of a list may still run when one of them starts: those from first_running on.
struct PdlStart {
  size_t command = 0;
  size_t first_running = 0;
  bool launches_first = false;  // as CudaKernel has it
  bool beside_others = false;   // kernels that are not of the list may still run, too

  PdlStart() = default;
  // All others have ended.
  explicit PdlStart(size_t index) : command(index), first_running(index) {}
  // A kernel of which nothing is known, ahead of the list.
  static PdlStart of_others() {
    PdlStart start;
    start.launches_first = start.beside_others = true;
    return start;
  }
  // A command that may begin before this one has ended. It starts when all blocks of this one have
  // called pdl_launch_dependents; where they call it after pdl_wait, nothing older is left.
  PdlStart follow(size_t index) const {
    PdlStart next(index);
    next.first_running = launches_first ? first_running : command;
    next.beside_others = launches_first && beside_others;
    return next;
  }
};

EarlyReads early_reads(const CommandList& list, const PdlStart& start);

}  // namespace gyre::cuda
