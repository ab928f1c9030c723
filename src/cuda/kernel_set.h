#pragma once

#include <span>
#include <string>

#include "cuda/kernel.h"

namespace gyre::cuda {

// What a GPU of some limits has of a table of kernels. Compiles nothing.
class KernelSet {
 public:
  KernelSet(std::span<const CudaKernel> table, const CudaLimits& limits)
      : table_(table), limits_(limits) {}

  const CudaLimits& limits() const { return limits_; }
  const CudaKernel* row(const KernelInfo& kernel, uint64_t spec) const;  // null: no such kernel
  // As in DeviceImpl.
  std::string describe(const KernelInfo& kernel, uint64_t spec) const;
  bool plan(const KernelInfo& kernel, const void* problem, void* plan) const;
  std::span<const uint64_t> planned_specs(const KernelInfo& kernel) const;

 private:
  const CudaKernel* find(const KernelInfo& kernel) const;

  std::span<const CudaKernel> table_;
  CudaLimits limits_;
};

}  // namespace gyre::cuda
