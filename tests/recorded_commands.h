#pragma once
// What an encoder holds, before it is submitted.

#include "gyre_test.h"
#include "runtime/recorder.h"

namespace gyre::test {

struct RecordedCommand {
  const KernelInfo* kernel = nullptr;
  uint64_t spec = 0;
  std::vector<std::byte> params;
};

inline std::vector<RecordedCommand> recorded_commands(const Encoder& encoder) {
  Recording recording(encoder, "recorded_commands");
  const CommandList& list = recording.list();
  std::vector<RecordedCommand> all;
  for (const Command& command : list.commands) {
    const KernelInfo& kernel = *command.pipeline->kernel;
    const auto* const params = static_cast<const std::byte*>(list.params_of(command));
    all.push_back({&kernel, command.pipeline->spec, {params, params + kernel.params_bytes}});
  }
  recording.commit();
  return all;
}

}  // namespace gyre::test
