#pragma once

#include <cstdint>
#include <string>

#include "runtime/kernels.h"

namespace gyre::cuda {

struct Launch {
  uint32_t grid[3];
  uint32_t block;
  uint32_t shared_bytes;
};

struct CudaLimits {
  uint32_t multiprocessors;
  uint32_t shared_bytes_per_block;
  uint32_t shared_bytes_per_multiprocessor;
  uint32_t arch;  // 90
};

// A row of the CUDA table.
struct CudaKernel {
  const KernelInfo* info;
  const char* file;                    // "attention.cu"
  std::string (*name)(uint64_t spec);  // the name expression; empty: no such kernel
  Launch (*launch)(const void* params, uint64_t spec, const CudaLimits& limits);
  const char* options;  // extra compiler options, or null
};

}  // namespace gyre::cuda
