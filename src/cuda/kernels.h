#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "cuda/kernel.h"

namespace gyre::cuda {

// What DeviceInfo::attention_pieces (for each multiprocessor) and attention_fewest_keys are here:
// four blocks of 128 threads fit side by side, and two chunks of 64 keys are worth a block.
constexpr uint32_t kAttentionPieces = 4, kAttentionFewestKeys = 128;

std::string name_attention(uint64_t spec);
Launch launch_attention(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_attention_merge(uint64_t spec);
Launch launch_attention_merge(const void* params, uint64_t spec, const CudaLimits& limits);

}  // namespace gyre::cuda
