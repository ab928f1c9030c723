#pragma once

#include <utility>

#include "cuda/early_reads.h"
#include "cuda/stream.h"

namespace gyre::cuda {

// How the launches of a list follow each other on one stream: each may begin before the one ahead
// has ended where its kernel waits by itself (pdl_wait).
class LaunchOrder {
 public:
  // `pdl`: whether the GPU can do so, and a kernel is ahead of the list. `running`: what may still
  // run when the list begins before that kernel has ended.
  LaunchOrder(const CommandList& list, bool pdl, bool behind_kernel, RunningWrites running)
      : list_(list), pdl_(pdl), has_ahead_(behind_kernel), running_(std::move(running)) {}

  // A kernel that lets the next one begin before it has waited would leave that one with as little
  // to read early as it knows itself: where that is nothing, it begins when all ahead has ended.
  bool overlaps(const Command& command) const {
    return pdl_ && has_ahead_ && command.pipeline->kernel->code == nullptr &&
           (running_.is_known() || !launches_first(command));
  }
  EarlyReads reads(const Command& command) const {
    return start(command).early_reads(list_, command);
  }
  void launched(const Command& command) {
    running_ = start(command).behind(list_, command, launches_first(command));
    has_ahead_ = true;
  }
  const RunningWrites& running() const { return running_; }

 private:
  RunningWrites start(const Command& command) const {
    return overlaps(command) ? running_ : RunningWrites();
  }

  const CommandList& list_;
  const bool pdl_;
  bool has_ahead_;
  RunningWrites running_;
};

}  // namespace gyre::cuda
