#pragma once

#include <cstdint>
#include <string>

#include "runtime/kernels.h"

namespace gyre::cuda {

struct Launch {
  uint32_t grid[3] = {1, 1, 1};  // a zero: nothing to do
  uint32_t block = 0;
  uint32_t shared_bytes = 0;  // dynamic
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
  const KernelInfo* info;
  const char* file;                    // in src/cuda/kernels
  std::string (*name)(uint64_t spec);  // the name expression; empty: no such kernel
  Launch (*launch)(const void* params, uint64_t spec, const CudaLimits& limits);
  const char* options = nullptr;  // further compiler options, between spaces
};

// What a kernel gets behind its params: addresses in the order of KernelInfo::args, 0 for an absent
// one. kernels/args.cuh declares the same.
struct Args {
  uint64_t at[kMaxArgs];
};

}  // namespace gyre::cuda
