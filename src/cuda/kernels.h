#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "cuda/kernel.h"

namespace gyre::cuda {

std::string name_kv_copy(uint64_t spec);
Launch launch_kv_copy(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_extend(uint64_t spec);
Launch launch_kv_extend(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_bytes_copy(uint64_t spec);
Launch launch_bytes_copy(const void* params, uint64_t spec, const CudaLimits& limits);

std::span<const CudaKernel> kernel_table();

}  // namespace gyre::cuda
