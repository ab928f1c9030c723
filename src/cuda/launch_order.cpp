#include "cuda/launch_order.h"

#include <utility>

#include "cuda/pipeline.h"

namespace gyre::cuda {

Launch launch_of(const CommandList& list, const Command& command, const CudaLimits& limits) {
  const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
  const Launch shape = pipeline.row().launch(list.params_of(command), pipeline.spec, limits);
  if (!shape.empty()) pipeline.check(shape);
  return shape;
}

bool launches_first(const Command& command) {
  return static_cast<const CudaPipeline&>(*command.pipeline).row().launches_first;
}

LaunchOrder::LaunchOrder(const CommandList& list, const CudaLimits& limits, bool pdl,
                         bool behind_kernel, RunningWrites beside)
    : steps(list.commands.size()), running(std::move(beside)) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const Command& command = list.commands[i];
    if (launch_of(list, command, limits).empty() || !pdl) continue;
    // A kernel that lets the next one begin before it has waited would leave that one with as
    // little to read early as it knows itself: where that is nothing, it begins when all ahead has
    // ended.
    steps[i].overlaps = behind_kernel && command.pipeline->kernel->code == nullptr &&
                        (running.is_known() || !launches_first(command));
    if (!steps[i].overlaps) running = {};
    steps[i].early = running.early_reads(list, command);
    running = running.behind(list, command, launches_first(command));
    behind_kernel = true;
  }
}

}  // namespace gyre::cuda
