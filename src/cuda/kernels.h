#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "cuda/kernel.h"

namespace gyre::cuda {

std::string name_attention(uint64_t spec);
Launch launch_attention(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_attention_merge(uint64_t spec);
Launch launch_attention_merge(const void* params, uint64_t spec, const CudaLimits& limits);

}  // namespace gyre::cuda
