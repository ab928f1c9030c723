#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "metal/kernel.h"

namespace gyre::metal {

using LaunchFn = Launch(const void* params, uint64_t spec);

// launch_write: kv_quantize, kv_append and kv_write.
LaunchFn launch_kv_copy, launch_kv_extend, launch_bytes_copy, launch_words_write,
    launch_kv_page_copy, launch_rope, launch_rope_append, launch_hadamard, launch_write,
    launch_kv_dequantize, launch_kv_feedback, launch_kv_transform, launch_attention,
    launch_attention_decode, launch_attention_many_rows, launch_attention_merge;
bool has_attention(uint64_t spec);
bool plan_attention(const void* problem, void* plan);

std::span<const MetalKernel> kernel_table();

}  // namespace gyre::metal
