#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "metal/kernel.h"

namespace gyre::metal {

Launch launch_kv_copy(const void* params, uint64_t spec);
Launch launch_kv_extend(const void* params, uint64_t spec);
Launch launch_bytes_copy(const void* params, uint64_t spec);
Launch launch_words_write(const void* params, uint64_t spec);
Launch launch_kv_page_copy(const void* params, uint64_t spec);

Launch launch_rope(const void* params, uint64_t spec);
Launch launch_rope_append(const void* params, uint64_t spec);

Launch launch_hadamard(const void* params, uint64_t spec);
Launch launch_kv_quantize(const void* params, uint64_t spec);
Launch launch_kv_dequantize(const void* params, uint64_t spec);
Launch launch_kv_append(const void* params, uint64_t spec);
Launch launch_kv_write(const void* params, uint64_t spec);
Launch launch_kv_feedback(const void* params, uint64_t spec);
Launch launch_kv_transform(const void* params, uint64_t spec);
bool has_attention(uint64_t spec);
Launch launch_attention(const void* params, uint64_t spec);
Launch launch_attention_decode(const void* params, uint64_t spec);
Launch launch_attention_many_rows(const void* params, uint64_t spec);
Launch launch_attention_merge(const void* params, uint64_t spec);
bool plan_attention(const void* problem, void* plan);

std::span<const MetalKernel> kernel_table();

}  // namespace gyre::metal
