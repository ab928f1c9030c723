#pragma once
// The entry points of every CUDA kernel file, listed once in table.cpp. All of these are compiled
// with --fmad=false: bits are the CPU's.

#include "cuda/kernel.h"

namespace gyre::cuda {

std::string rope_name(uint64_t spec);
Launch rope_launch(const void* params, uint64_t spec, const CudaLimits& limits);

std::string hadamard_name(uint64_t spec);
Launch hadamard_launch(const void* params, uint64_t spec, const CudaLimits& limits);

std::string kv_quantize_name(uint64_t spec);
Launch kv_quantize_launch(const void* params, uint64_t spec, const CudaLimits& limits);

std::string kv_dequantize_name(uint64_t spec);
Launch kv_dequantize_launch(const void* params, uint64_t spec, const CudaLimits& limits);

std::string kv_append_name(uint64_t spec);
Launch kv_append_launch(const void* params, uint64_t spec, const CudaLimits& limits);

}  // namespace gyre::cuda
