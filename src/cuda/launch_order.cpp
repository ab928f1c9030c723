#include "cuda/launch_order.h"

#include <utility>

#include "cuda/pipeline.h"

namespace gyre::cuda {

Launch launch_shape(const CommandList& list, const Command& command, const CudaLimits& limits) {
  const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
  const Launch shape = pipeline.row().launch(list.params_of(command), pipeline.spec, limits);
  if (!shape.empty()) pipeline.check(shape);
  return shape;
}

bool waits_by_itself(const Command& command) { return command.pipeline->kernel->code == nullptr; }

bool launches_first(const Command& command) {
  return static_cast<const CudaPipeline&>(*command.pipeline).row().launches_first;
}

LaunchOrder::LaunchOrder(const CommandList& list, const CudaLimits& limits, bool pdl,
                         bool behind_kernel, RunningWrites beside)
    : steps(list.commands.size()), running(std::move(beside)) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const Command& command = list.commands[i];
    if (launch_shape(list, command, limits).empty() || !pdl) continue;
    // Behind an unknown kernel, a kernel that launches first begins when all ahead has ended:
    // otherwise the kernel after it could read nothing early.
    steps[i].overlaps = behind_kernel && waits_by_itself(command) &&
                        (running.is_known() || !launches_first(command));
    if (behind_kernel && !steps[i].overlaps) running = {};
    steps[i].early = running.early_reads(list, command);
    running = running.after(list, command, launches_first(command));
    behind_kernel = true;
  }
}

}  // namespace gyre::cuda
