#pragma once
// A device on which the text of CUDA kernels runs, fiber by fiber: the CPU's with another table, so
// that the ops and their test cases reach it as they reach any other.

#include <span>
#include <vector>

#include "cpu/device.h"
#include "cuda/kernel.h"
#include "gyre/gyre.h"

// After the library's headers: it brings CUDA's words.
#include "cuda_host/cuda_host.h"

namespace gyre::cuda {
struct Args;
}

namespace gyre::test {

inline uint32_t early_args = 0;  // EarlyBits of launches

inline uint32_t one_task(const void* /*params*/, uint64_t /*spec*/) { return 1; }

// One launch, its shape found as the backend finds it.
template <class Params, class Args, class Launch>
void launch_on_host(void (*kernel)(Params, Args), Launch shape, const void* params,
                    const uint64_t* arguments, uint32_t count, uint64_t spec) {
  const auto& p = *static_cast<const Params*>(params);
  const cuda::CudaLimits limits{132, 227 << 10, 228 << 10, 90};
  const cuda::Launch how = shape(params, spec, limits);
  Args args{};
  std::copy_n(arguments, count, args.at);
  if constexpr (requires { args.early; }) args.early = args.early_old = early_args;
  cuda_host::launch(dim3(how.grid[0], how.grid[1], how.grid[2]), how.block, how.shared_bytes,
                    kernel, p, args);
}

// The CPU's table with some rows replaced.
inline std::vector<cpu::CpuKernel> table_with(std::span<const cpu::CpuKernel> replaced) {
  const auto cpu_table = cpu::kernel_table();
  std::vector<cpu::CpuKernel> table(cpu_table.begin(), cpu_table.end());
  for (cpu::CpuKernel& row : table) {
    for (const cpu::CpuKernel& other : replaced) {
      if (row.info == other.info) row = other;
    }
  }
  return table;
}

}  // namespace gyre::test
