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

std::string name_words_write(uint64_t spec);
Launch launch_words_write(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_rope(uint64_t spec);
Launch launch_rope(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_hadamard(uint64_t spec);
Launch launch_hadamard(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_quantize(uint64_t spec);
Launch launch_kv_quantize(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_dequantize(uint64_t spec);
Launch launch_kv_dequantize(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_feedback(uint64_t spec);
Launch launch_kv_feedback(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_transform(uint64_t spec);
Launch launch_kv_transform(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_append(uint64_t spec);
Launch launch_kv_append(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_write(uint64_t spec);
Launch launch_kv_write(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_rope_append(uint64_t spec);
Launch launch_rope_append(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_kv_page_copy(uint64_t spec);
Launch launch_kv_page_copy(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_attention(uint64_t spec);
Launch launch_attention(const void* params, uint64_t spec, const CudaLimits& limits);
bool plan_attention(const void* problem, const CudaLimits& limits, void* plan);

std::string name_attention_decode(uint64_t spec);
Launch launch_attention_decode(const void* params, uint64_t spec, const CudaLimits& limits);
bool fits_attention_decode(uint64_t spec, const CudaLimits& limits);  // false: no such kernel

std::string name_attention_many_rows(uint64_t spec);
Launch launch_attention_many_rows(const void* params, uint64_t spec, const CudaLimits& limits);
bool fits_attention_many_rows(uint64_t spec, const CudaLimits& limits);  // false: no such kernel

std::string name_attention_latent(uint64_t spec);
Launch launch_attention_latent(const void* params, uint64_t spec, const CudaLimits& limits);
bool fits_attention_latent(uint64_t spec, const CudaLimits& limits);  // false: no such kernel

std::string name_attention_schedule(uint64_t spec);
Launch launch_attention_schedule(const void* params, uint64_t spec, const CudaLimits& limits);

std::string name_attention_merge(uint64_t spec);
Launch launch_attention_merge(const void* params, uint64_t spec, const CudaLimits& limits);

std::span<const CudaKernel> kernel_table();

}  // namespace gyre::cuda
