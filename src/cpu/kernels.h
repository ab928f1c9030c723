#pragma once
// The entry points of every CPU kernel file, listed once in table.cpp.

#include "cpu/kernel.h"

namespace gyre::cpu {

TaskFn select_kv_copy(uint64_t spec);
uint32_t kv_copy_tasks(const void* params, uint64_t spec);

TaskFn select_rope(uint64_t spec);
uint32_t rope_tasks(const void* params, uint64_t spec);

TaskFn select_hadamard(uint64_t spec);
uint32_t hadamard_tasks(const void* params, uint64_t spec);

TaskFn select_kv_quantize(uint64_t spec);
uint32_t kv_quantize_tasks(const void* params, uint64_t spec);

TaskFn select_kv_dequantize(uint64_t spec);
uint32_t kv_dequantize_tasks(const void* params, uint64_t spec);

TaskFn select_kv_feedback(uint64_t spec);
uint32_t kv_feedback_tasks(const void* params, uint64_t spec);

TaskFn select_kv_transform(uint64_t spec);
uint32_t kv_transform_tasks(const void* params, uint64_t spec);

TaskFn select_attention(uint64_t spec);
uint32_t attention_tasks(const void* params, uint64_t spec);
std::string describe_attention(uint64_t spec);
void reset_attention(const void* params, const uint64_t* args);

TaskFn select_attention_merge(uint64_t spec);
uint32_t attention_merge_tasks(const void* params, uint64_t spec);

TaskFn select_kv_extend(uint64_t spec);
uint32_t kv_extend_tasks(const void* params, uint64_t spec);

TaskFn select_kv_append(uint64_t spec);
uint32_t kv_append_tasks(const void* params, uint64_t spec);

TaskFn select_kv_write(uint64_t spec);
uint32_t kv_write_tasks(const void* params, uint64_t spec);

TaskFn select_rope_append(uint64_t spec);
uint32_t rope_append_tasks(const void* params, uint64_t spec);

TaskFn select_kv_page_copy(uint64_t spec);
uint32_t kv_page_copy_tasks(const void* params, uint64_t spec);

TaskFn select_bytes_copy(uint64_t spec);
uint32_t bytes_copy_tasks(const void* params, uint64_t spec);

TaskFn select_words_write(uint64_t spec);
uint32_t words_write_tasks(const void* params, uint64_t spec);

}  // namespace gyre::cpu
