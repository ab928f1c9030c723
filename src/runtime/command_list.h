#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/kernel_code.h"
#include "runtime/storage.h"

namespace gyre {

// What a backend builds for one (kernel, spec). Backends derive from it. Where building takes long
// it goes on after the pipeline was handed out: commands can be recorded with it, and what runs
// them calls finish() first.
struct Pipeline {
  const KernelInfo* kernel = nullptr;
  uint64_t spec = 0;

  Pipeline(const KernelInfo& info, uint64_t key)
      : kernel(&info),
        spec(key),
        code_(info.code != nullptr ? info.code->shared_from_this() : nullptr) {}
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  virtual ~Pipeline() = default;

  bool is_built() const { return built_.load(std::memory_order_acquire); }
  // Returns when it is built; throws why it cannot be.
  void finish() const {
    if (!is_built()) wait();
  }

 protected:
  void set_built(bool built) const { built_.store(built, std::memory_order_release); }

 private:
  virtual void wait() const {}

  mutable std::atomic<bool> built_{true};
  std::shared_ptr<const KernelCode> code_;  // has what `kernel` points at
};

struct Command {
  const Pipeline* pipeline;
  uint32_t params_offset;  // into CommandList::params, in 8-byte words
  uint32_t first_arg;      // into CommandList::args; the kernel knows how many
  bool barrier;            // must wait for every earlier command
};

// The one form in which work travels: eager submit and graph replay read the same list.
struct CommandList {
  std::vector<Command> commands;
  std::vector<uint64_t> params;
  std::vector<uint64_t> args;                              // addresses; 0 for an absent argument
  std::vector<uint64_t> arg_bytes;                         // from each address on; as long as args
  std::vector<std::shared_ptr<Storage>> storages;          // kept alive until the work is done,
  std::vector<std::shared_ptr<const Pipeline>> pipelines;  // and so are those of custom kernels

  const void* params_of(const Command& command) const {
    return params.data() + command.params_offset;
  }
  const uint64_t* args_of(const Command& command) const { return args.data() + command.first_arg; }
  const uint64_t* arg_bytes_of(const Command& command) const {
    return arg_bytes.data() + command.first_arg;
  }
  // Before any of it runs.
  void finish_pipelines() const {
    for (const Command& command : commands) command.pipeline->finish();
  }
  void clear() {
    commands.clear();
    params.clear();
    args.clear();
    arg_bytes.clear();
    storages.clear();
    pipelines.clear();
  }
};

}  // namespace gyre
