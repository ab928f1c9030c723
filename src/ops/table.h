#pragma once
// What traces and listings know about the kernels, kernel by kernel: `shape` prints the sizes in
// Params, `specs` lists every Spec an op can ask for. Each pair is defined beside its op.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "abi/kernels.h"
#include "gyre/dtype.h"
#include "runtime/kernel_use.h"

namespace gyre {

using ShapeFn = std::string(const void* params);
using SpecsFn = std::span<const uint64_t>();

ShapeFn kv_copy_shape, rope_shape, hadamard_shape, kv_quantize_shape, kv_dequantize_shape,
    kv_feedback_shape, kv_transform_shape, attention_shape, attention_schedule_shape,
    attention_merge_shape, kv_extend_shape, kv_append_shape, kv_write_shape, rope_append_shape,
    kv_page_copy_shape, bytes_copy_shape, words_write_shape;
// plain_specs: one, without a choice.
SpecsFn kv_copy_specs, rope_specs, hadamard_specs, kv_quantize_specs, kv_dequantize_specs,
    kv_feedback_specs, kv_transform_specs, attention_specs, attention_merge_specs, kv_append_specs,
    kv_write_specs, rope_append_specs, plain_specs;

inline constexpr std::array kFloats = {DType::f32, DType::f16, DType::bf16};

// The Specs that `list` adds; made once.
template <class List>
std::span<const uint64_t> spec_list(const List& list) {
  static const auto& kSpecs = *new std::vector<uint64_t>([&] {
    std::vector<uint64_t> specs;
    list([&](const auto& spec) { specs.push_back(spec_key(spec)); });
    return specs;
  }());
  return kSpecs;
}

// Every kernel of the library.
std::span<const KernelUse> kernel_uses();

}  // namespace gyre
