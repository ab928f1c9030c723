#pragma once
// What kernels may read before pdl_wait: arguments that no command which may still run at that time
// writes.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/command_list.h"

namespace gyre::cuda {

// A bit for each argument, as EarlyBits has them.
struct EarlyReads {
  uint32_t unwritten = ~0u;
  uint32_t old = ~0u;
};

// Memory that is written by kernels that may still run when another one starts.
class RunningWrites {
 public:
  RunningWrites() = default;  // none runs
  // Kernels run of which nothing is known.
  static RunningWrites unknown() {
    RunningWrites writes;
    writes.is_known_ = false;
    return writes;
  }

  bool is_known() const { return is_known_; }
  EarlyReads early_reads(const CommandList& list, const Command& reader) const;
  // The writes beside a kernel that starts when all blocks of `command` have called
  // pdl_launch_dependents, if that started beside these. A command that calls it after pdl_wait
  // leaves none of these; `launches_first` is CudaKernel's.
  RunningWrites after(const CommandList& list, const Command& command, bool launches_first) const;

 private:
  struct Write {
    uint64_t address, bytes;
    bool appended;
  };

  bool is_known_ = true;
  std::vector<Write> writes_;
};

}  // namespace gyre::cuda
