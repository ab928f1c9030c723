#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/kernels.h"
#include "runtime/storage.h"

namespace gyre {

// What a backend builds for one (kernel, spec). Backends derive from it.
struct Pipeline {
  const KernelInfo* kernel = nullptr;
  uint64_t spec = 0;

  Pipeline(const KernelInfo& info, uint64_t key) : kernel(&info), spec(key) {}
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  virtual ~Pipeline() = default;
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
  std::vector<uint64_t> args;                      // addresses; 0 for an absent argument
  std::vector<std::shared_ptr<Storage>> storages;  // kept alive until the work is done

  const void* params_of(const Command& command) const {
    return params.data() + command.params_offset;
  }
  const uint64_t* args_of(const Command& command) const { return args.data() + command.first_arg; }
  void clear() {
    commands.clear();
    params.clear();
    args.clear();
    storages.clear();
  }
};

}  // namespace gyre
