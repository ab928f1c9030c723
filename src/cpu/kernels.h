#pragma once
// The entry points of every CPU kernel file, listed once in table.cpp.

#include "cpu/kernel.h"

namespace gyre::cpu {

using SelectFn = TaskFn(uint64_t spec);
using TasksFn = uint32_t(const void* params, uint64_t spec);

// select_write: kv_quantize, kv_append and kv_write.
SelectFn select_kv_copy, select_rope, select_hadamard, select_kv_dequantize, select_kv_feedback,
    select_kv_transform, select_attention, select_attention_merge, select_write, select_rope_append,
    select_kv_extend, select_words_write, select_kv_page_copy, select_bytes_copy;
TasksFn kv_copy_tasks, rope_tasks, hadamard_tasks, kv_dequantize_tasks, kv_feedback_tasks,
    kv_transform_tasks, attention_tasks, attention_merge_tasks, write_tasks, rope_append_tasks,
    kv_page_copy_tasks, bytes_copy_tasks, one_task;

std::string describe_attention(uint64_t spec);
ArgBytes zeroed_by_attention(const void* params);

}  // namespace gyre::cpu
