#pragma once

#include <vector>

#include "metal/buffers.h"
#include "runtime/command_list.h"

namespace gyre::metal {

// A list as the driver takes it. Points into the list.
struct PreparedList {
  struct Step {
    Dispatch dispatch;
    uint32_t command = 0;  // of the list
    bool barrier = false;  // before it
  };
  std::vector<Step> steps;  // commands with nothing to do are left out

  // Refuses what a pipeline cannot run. Pipelines must be built.
  PreparedList(const CommandList& list, const Buffers& buffers);
};

}  // namespace gyre::metal
