#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/kernel_cache.h"
#include "cuda/nvrtc.h"

namespace gyre::cuda {

struct CompileJob {
  std::string_view file;  // in src/cuda/kernels
  std::string name;       // the name expression
  std::string_view options = {};
  uint32_t arch = 0;  // 90
};

// Throws compile_failed with the compiler's log.
CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job);
// The same through the cache.
CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job, const KernelCache& cache);

}  // namespace gyre::cuda
