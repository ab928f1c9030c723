#pragma once
// The entry points of every kernel family, listed once in table.cpp.

#include <span>

#include "cuda/kernel.h"

namespace gyre::cuda {

using NameFn = std::string(uint64_t spec);
using LaunchFn = Launch(const void* params, uint64_t spec, const CudaLimits& limits);
using SpecsFn = std::span<const uint64_t>();
using FitsFn = bool(uint64_t spec, const CudaLimits& limits);  // false: no such kernel

NameFn name_kv_copy, name_kv_extend, name_bytes_copy, name_words_write, name_rope, name_hadamard,
    name_kv_quantize, name_kv_dequantize, name_kv_feedback, name_kv_transform, name_kv_append,
    name_kv_write, name_rope_append, name_kv_page_copy, name_attention, name_attention_decode,
    name_attention_many_rows, name_attention_latent, name_attention_schedule, name_attention_merge;
// launch_write: kv_quantize, kv_append and kv_write.
LaunchFn launch_kv_copy, launch_kv_extend, launch_bytes_copy, launch_words_write, launch_rope,
    launch_hadamard, launch_kv_dequantize, launch_kv_feedback, launch_kv_transform, launch_write,
    launch_rope_append, launch_kv_page_copy, launch_attention, launch_attention_decode,
    launch_attention_many_rows, launch_attention_latent, launch_attention_schedule,
    launch_attention_merge;
SpecsFn attention_decode_specs, attention_rows_specs, attention_latent_specs;
FitsFn fits_attention_decode, fits_attention_many_rows, fits_attention_latent;
bool plan_attention(const void* problem, const CudaLimits& limits, void* plan);

std::span<const CudaKernel> kernel_table();

}  // namespace gyre::cuda
