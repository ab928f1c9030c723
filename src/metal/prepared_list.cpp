#include "metal/prepared_list.h"

#include "metal/pipeline.h"
#include "runtime/require.h"

namespace gyre::metal {
namespace {

constexpr uint64_t kAlignment = 16;  // of what kernels move at a time

bool is_empty(const Launch& launch) {
  return launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0 || launch.threads == 0;
}

void check(const MetalPipeline& pipeline, const Launch& launch, const Buffers& buffers) {
  const auto refuse = [&](const char* what, uint64_t limit, uint64_t asked) {
    fail(ErrorCode::unsupported, pipeline.kernel->name, ": ", buffers.device().name,
         " runs it with ", what, " of at most ", limit, ", the launch asks for ", asked);
  };
  if (launch.threads > pipeline.max_threads())
    refuse("threads a threadgroup", pipeline.max_threads(), launch.threads);
  if (launch.threadgroup_bytes > buffers.device().threadgroup_bytes)
    refuse("bytes of threadgroup memory", buffers.device().threadgroup_bytes,
           launch.threadgroup_bytes);
  if (pipeline.kernel->params_bytes > kMaxParamsBytes)
    refuse("bytes of params", kMaxParamsBytes, pipeline.kernel->params_bytes);
}

Dispatch dispatch_of(const CommandList& list, const Command& command, const Launch& launch,
                     const AddressMap& addresses, Buffer* nothing) {
  const auto& pipeline = static_cast<const MetalPipeline&>(*command.pipeline);
  const KernelInfo& kernel = *pipeline.kernel;
  const uint64_t* const args = list.args_of(command);
  Dispatch made;
  made.state = pipeline.state();
  made.params = list.params_of(command);
  made.params_bytes = kernel.params_bytes;
  made.binding_count = kernel.arg_count;
  for (uint32_t i = 0; i < kernel.arg_count; ++i) {
    made.bindings[i] = args[i] != 0 ? addresses.find(args[i]) : Binding{nothing, 0};
    if (args[i] != 0) made.arguments |= 1u << i;
    if (args[i] % kAlignment == 0) made.arguments |= 1u << (kMaxBindings + i);  // 0, too
  }
  for (int d = 0; d < 3; ++d) made.grid[d] = launch.grid[d];
  made.threads = launch.threads;
  made.threadgroup_bytes =
      (launch.threadgroup_bytes + kThreadgroupUnit - 1) / kThreadgroupUnit * kThreadgroupUnit;
  return made;
}

}  // namespace

static_assert(kMaxBindings == kMaxArgs);

PreparedList::PreparedList(const CommandList& list, const Buffers& buffers) {
  const AddressMap addresses(list.storages, buffers);
  steps.reserve(list.commands.size());
  bool barrier = false;  // also that of commands which are left out
  for (uint32_t i = 0; i < list.commands.size(); ++i) {
    const Command& command = list.commands[i];
    const auto& pipeline = static_cast<const MetalPipeline&>(*command.pipeline);
    barrier = barrier || command.barrier;
    const Launch launch = pipeline.row().launch(list.params_of(command), pipeline.spec);
    if (is_empty(launch)) continue;
    check(pipeline, launch, buffers);
    const bool waits = barrier && !steps.empty();
    steps.push_back({dispatch_of(list, command, launch, addresses, buffers.nothing()), i, waits});
    barrier = false;
  }
}

}  // namespace gyre::metal
