#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "abi/kernels.h"
#include "gyre/custom_kernel.h"
#include "gyre/device.h"

namespace gyre::cpu {

// Task `task` of `tasks`. Tasks of a command run in any order and at the same time; how many there
// are and which does what depends only on params, never on the number of threads, so results do not
// either.
using TaskFn = CustomTask;

// The first bytes of an argument's memory.
struct ArgBytes {
  uint32_t arg = 0;
  uint64_t bytes = 0;
};

// A row of the CPU's table. select: code for a spec on this machine, null if there is none.
// tasks: how many there are; 0 when there is no work, 1 when sharing it would cost more than it
// saves. plan: as DeviceImpl::plan.
struct CpuKernel {
  const KernelInfo* info = nullptr;
  TaskFn (*select)(uint64_t spec) = nullptr;
  uint32_t (*tasks)(const void* params, uint64_t spec) = nullptr;
  std::string (*describe)(uint64_t spec) = nullptr;  // what the code is made of, where that varies
  bool (*plan)(const void* problem, const DeviceInfo& device, void* plan) = nullptr;
  uint64_t scratch_bytes = 0;  // what task_scratch() has while a task of it runs
  // Memory in which tasks leave something for each other: 0 when the first of them begins.
  ArgBytes (*zeroed)(const void* params) = nullptr;
};

// Memory of the thread that runs a task, as large as its kernel's row says, aligned to 64 bytes.
// The executor takes it before a list runs: a task takes none and cannot fail. Its content is
// whatever was there.
void* task_scratch();

// Whether DeviceOptions::poll has ended the list: what the task would write is not used any more.
// Tasks that may take longer than a millisecond ask between parts of their work, and return.
// Between such calls other code may have run on the thread.
bool task_ended();

// The half-open share of `items` that task `task` of `tasks` takes.
struct Share {
  uint64_t begin, end;
};
inline Share share_of(uint64_t items, uint32_t task, uint32_t tasks) {
  const uint64_t each = items / tasks;
  const uint64_t remainder = items % tasks;
  const uint64_t begin = each * task + (task < remainder ? task : remainder);
  return {begin, begin + each + (task < remainder ? 1 : 0)};
}

// How many tasks: as many as wanted, but one at least and at most one for each of `parts`; none
// where there are no parts.
inline uint32_t task_count(uint64_t wanted, uint64_t parts) {
  constexpr uint64_t kMax = 1 << 20;
  return static_cast<uint32_t>(std::min({std::max<uint64_t>(wanted, 1), parts, kMax}));
}

template <class T>
T* pointer(uint64_t arg) {
  return reinterpret_cast<T*>(arg);  // NOLINT(performance-no-int-to-ptr): args are addresses
}

}  // namespace gyre::cpu
