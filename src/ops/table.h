#pragma once
// What traces and listings know about the kernels, kernel by kernel: `shape` prints the sizes in
// Params, `specs` lists every Spec an op can ask for. Each pair is defined beside its op.

#include <cstdint>
#include <span>
#include <string>

#include "runtime/kernels.h"

namespace gyre {

std::string kv_copy_shape(const void* params);
std::span<const uint64_t> kv_copy_specs();

std::string rope_shape(const void* params);
std::span<const uint64_t> rope_specs();

std::string hadamard_shape(const void* params);
std::span<const uint64_t> hadamard_specs();

std::string kv_quantize_shape(const void* params);
std::span<const uint64_t> kv_quantize_specs();

std::string kv_dequantize_shape(const void* params);
std::span<const uint64_t> kv_dequantize_specs();

std::string kv_feedback_shape(const void* params);
std::span<const uint64_t> kv_feedback_specs();

std::string kv_transform_shape(const void* params);
std::span<const uint64_t> kv_transform_specs();

std::string attention_shape(const void* params);
std::span<const uint64_t> attention_specs();
std::span<const uint64_t> attention_decode_specs();
std::span<const uint64_t> attention_rows_specs();
std::span<const uint64_t> attention_latent_specs();

std::string attention_schedule_shape(const void* params);
std::string attention_merge_shape(const void* params);
std::span<const uint64_t> attention_merge_specs();

std::string kv_extend_shape(const void* params);
std::string kv_append_shape(const void* params);
std::span<const uint64_t> kv_append_specs();
std::string kv_write_shape(const void* params);
std::span<const uint64_t> kv_write_specs();
std::string rope_append_shape(const void* params);
std::span<const uint64_t> rope_append_specs();
std::string kv_page_copy_shape(const void* params);
std::string bytes_copy_shape(const void* params);
std::string words_write_shape(const void* params);
std::span<const uint64_t> plain_specs();  // one, without a choice

// Every kernel of the library.
std::span<const KernelUse> kernel_uses();

}  // namespace gyre
