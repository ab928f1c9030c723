#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "abi/kernels.h"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

struct Launch {
  uint32_t grid[3] = {1, 1, 1};  // a zero: nothing to do
  uint32_t block = 0;
  uint32_t shared_bytes = 0;  // dynamic

  bool empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

struct CudaLimits {
  uint32_t multiprocessors = 0;
  uint32_t shared_bytes_per_block = 0;
  uint32_t shared_bytes_per_multiprocessor = 0;
  uint32_t arch = 0;  // 90
};

// A row of the CUDA table. A command is one launch; its grid depends on params, spec and limits
// only.
struct CudaKernel {
  const KernelInfo* info = nullptr;
  const char* file = nullptr;                    // in src/cuda/kernels
  std::string (*name)(uint64_t spec) = nullptr;  // the name expression; empty: no such kernel
  Launch (*launch)(const void* params, uint64_t spec, const CudaLimits& limits) = nullptr;
  const char* options = nullptr;  // further compiler options, between spaces
  bool (*fits)(uint64_t spec, const CudaLimits& limits) = nullptr;  // null: every GPU
  // As DeviceImpl::plan.
  bool (*plan)(const void* problem, const CudaLimits& limits, void* plan) = nullptr;
  // Some kernel of the row calls pdl_launch_dependents before pdl_wait: when what follows starts,
  // the command ahead of this one may still run.
  bool launches_first = false;
  // Every spec that a plan can ask for, where the ops list none.
  std::span<const uint64_t> (*specs)() = nullptr;
};

static_assert(sizeof(Args::at) == kMaxArgs * sizeof(uint64_t));

}  // namespace gyre::cuda
