#pragma once

#include <cstdint>

#include "abi/kernels.h"

namespace gyre::metal {

constexpr uint32_t kLanes = 32;  // of a simdgroup

struct Launch {
  uint32_t grid[3] = {1, 1, 1};    // threadgroups; a zero: nothing to do
  uint32_t threads = 0;            // of each
  uint32_t threadgroup_bytes = 0;  // a multiple of 16, at most 32768
};

// A row of the Metal table. A command is one dispatch; its grid depends on params and spec only.
struct MetalKernel {
  const KernelInfo* info = nullptr;
  const char* file = nullptr;  // in src/metal/kernels; its entry function is called as the file
  Launch (*launch)(const void* params, uint64_t spec) = nullptr;
  bool (*has)(uint64_t spec) = nullptr;  // null: every spec
  // As DeviceImpl::plan.
  bool (*plan)(const void* problem, void* plan) = nullptr;
};

}  // namespace gyre::metal
