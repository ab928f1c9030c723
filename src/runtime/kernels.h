#pragma once
// The contract between ops and backends, on one page. An op names a kernel and hands over Spec,
// Params and Args; a backend has a table from kernels to code. Neither knows the other.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "abi/attention.h"
#include "abi/attention_plan.h"
#include "abi/bytes_copy.h"
#include "abi/hadamard.h"
#include "abi/kv_append.h"
#include "abi/kv_copy.h"
#include "abi/kv_dequantize.h"
#include "abi/kv_extend.h"
#include "abi/kv_feedback.h"
#include "abi/kv_quantize.h"
#include "abi/kv_write.h"
#include "abi/rope.h"
#include "abi/rope_append.h"
#include "abi/words_write.h"
#include "gyre/custom_kernel.h"

namespace gyre {

constexpr uint32_t kMaxArgs = 16;

struct ArgInfo {
  const char* name = nullptr;
  Access access = Access::read;
  bool appended = false;  // a write changes only bytes of the tokens that the command is given
};

// Identity is the address: one inline constant per kernel.
struct KernelInfo {
  const char* name = nullptr;
  uint32_t params_bytes = 0;
  uint32_t arg_count = 0;
  std::array<ArgInfo, kMaxArgs> args{};
  bool once = false;                 // its params hold for one moment: graphs refuse it
  const KernelCode* code = nullptr;  // of a kernel that is in no table: runtime/kernel_code.h
};

// What the ops say about a kernel they dispatch, for traces and listings. The ops have the table
// (ops/table.cpp); the composition root (devices.cpp) hands it to each device.
struct KernelUse {
  const KernelInfo* kernel = nullptr;
  std::string (*shape)(const void* params) = nullptr;  // the sizes in Params, as traces print them
  std::span<const uint64_t> (*specs)() = nullptr;      // every Spec an op can ask for
};

// "" where `uses` does not have the kernel.
std::string shape_of(std::span<const KernelUse> uses, const KernelInfo& kernel, const void* params);

// Ties a kernel to its Spec and Params types, so that a wrong pair does not compile. Problem: what
// a device plans (DeviceImpl::plan) before an op of this kernel is dispatched; void: nothing.
template <class Spec, class Params, class Problem = void>
struct Kernel {
  static_assert(sizeof(Spec) == 8, "a Spec is the pipeline key: exactly 8 bytes");
  static_assert(std::is_trivially_copyable_v<Params> && alignof(Params) <= 8);

  KernelInfo info;
};

template <class Spec>
constexpr uint64_t spec_key(const Spec& spec) {
  return std::bit_cast<uint64_t>(spec);
}

template <class Spec>
constexpr Spec spec_from_key(uint64_t key) {
  return std::bit_cast<Spec>(key);
}

inline constexpr Kernel<abi::KvCopySpec, abi::KvCopyParams> kKvCopy{{
    .name = "kv_copy",
    .params_bytes = sizeof(abi::KvCopyParams),
    .arg_count = 4,
    .args = {{{"k", Access::read},
              {"k_cache", Access::write},
              {"v", Access::read},
              {"v_cache", Access::write}}},
}};

// rope and norm_rope; absent outputs and weights are null.
inline constexpr Kernel<abi::RopeSpec, abi::RopeParams> kRope{{
    .name = "rope",
    .params_bytes = sizeof(abi::RopeParams),
    .arg_count = 11,
    .args = {{{"x", Access::read},
              {"positions", Access::read},
              {"out", Access::write},
              {"frequencies", Access::read},
              {"factors", Access::read},
              {"weight", Access::read},
              {"second", Access::write},
              {"k", Access::read},
              {"k_out", Access::write},
              {"k_weight", Access::read},
              {"k_second", Access::write}}},
}};

// Writes to the caches are read_write: tokens that share a tile of V with new ones keep their bits.
inline constexpr Kernel<abi::KvQuantizeSpec, abi::KvQuantizeParams> kKvQuantize{{
    .name = "kv_quantize",
    .params_bytes = sizeof(abi::KvQuantizeParams),
    .arg_count = 6,
    .args = {{{"k", Access::read},
              {"k_codes", Access::read_write},
              {"k_scales", Access::read_write},
              {"v", Access::read},
              {"v_codes", Access::read_write},
              {"v_scales", Access::read_write}}},
}};

inline constexpr Kernel<abi::KvDequantizeSpec, abi::KvDequantizeParams> kKvDequantize{{
    .name = "kv_dequantize",
    .params_bytes = sizeof(abi::KvDequantizeParams),
    .arg_count = 3,
    .args = {{{"codes", Access::read}, {"scales", Access::read}, {"out", Access::write}}},
}};

// Rows to calibrated rows, which the writers below take in place of k and v; what is absent is
// null.
inline constexpr Kernel<abi::KvFeedbackSpec, abi::KvFeedbackParams> kKvFeedback{{
    .name = "kv_feedback",
    .params_bytes = sizeof(abi::KvFeedbackParams),
    .arg_count = 14,
    .args = {{{"k", Access::read},
              {"k_matrix", Access::read},
              {"k_inverse", Access::read},
              {"k_mean", Access::read},
              {"k_factor", Access::read},
              {"k_diagonal", Access::read},
              {"k_calibrated", Access::write},
              {"v", Access::read},
              {"v_matrix", Access::read},
              {"v_inverse", Access::read},
              {"v_mean", Access::read},
              {"v_factor", Access::read},
              {"v_diagonal", Access::read},
              {"v_calibrated", Access::write}}},
}};

inline constexpr Kernel<abi::KvTransformSpec, abi::KvTransformParams> kKvTransform{{
    .name = "kv_transform",
    .params_bytes = sizeof(abi::KvTransformParams),
    .arg_count = 5,
    .args = {{{"x", Access::read},
              {"matrix", Access::read},
              {"before", Access::read},
              {"after", Access::read},
              {"out", Access::write}}},
}};

inline constexpr Kernel<abi::HadamardSpec, abi::HadamardParams> kHadamard{{
    .name = "hadamard",
    .params_bytes = sizeof(abi::HadamardParams),
    .arg_count = 2,
    .args = {{{"x", Access::read}, {"out", Access::write}}},
}};

// In the order of abi::AttentionArg.
inline constexpr std::array<ArgInfo, kMaxArgs> kAttentionArgs = {{{"q", Access::read},
                                                                  {"k_codes", Access::read},
                                                                  {"k_scales", Access::read},
                                                                  {"v_codes", Access::read},
                                                                  {"v_scales", Access::read},
                                                                  {"out", Access::write},
                                                                  {"lse", Access::write},
                                                                  {"sink_logits", Access::read},
                                                                  {"alibi_slopes", Access::read},
                                                                  {"tree_mask", Access::read},
                                                                  {"partial", Access::read_write},
                                                                  {"state", Access::read},
                                                                  {"table", Access::read},
                                                                  {"kv_lengths", Access::read},
                                                                  {"cu_seqlens_q", Access::read},
                                                                  {"is_prefill", Access::read}}};

// Either out (and lse, sink_logits) or partial; what is absent is null.
using PlannedAttention = Kernel<abi::AttentionSpec, abi::AttentionParams, abi::AttentionProblem>;
inline constexpr PlannedAttention kAttention{{
    .name = "attention",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 16,
    .args = kAttentionArgs,
}};

// As kAttention, for few rows over many keys; it reduces its splits itself. A plan says when a
// device takes it.
inline constexpr Kernel<abi::AttentionDecodeSpec, abi::AttentionParams> kAttentionDecode{{
    .name = "attention_decode",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 16,
    .args = kAttentionArgs,
}};

// As kAttention, for many rows on tensor cores, where a device has them.
inline constexpr Kernel<abi::AttentionRowsSpec, abi::AttentionParams> kAttentionManyRows{{
    .name = "attention_many_rows",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 16,
    .args = kAttentionArgs,
}};

// As kAttention, for latent attention; `partial` is the kernel's scratch memory. A plan says when a
// device takes it.
inline constexpr Kernel<abi::AttentionLatentSpec, abi::AttentionParams> kAttentionLatent{{
    .name = "attention_latent",
    .params_bytes = sizeof(abi::AttentionParams),
    .arg_count = 16,
    .args = kAttentionArgs,
}};

// Who works on what, for every call over the same pages, lengths and masks.
inline constexpr Kernel<abi::AttentionScheduleSpec, abi::AttentionScheduleParams>
    kAttentionSchedule{{
        .name = "attention_schedule",
        .params_bytes = sizeof(abi::AttentionScheduleParams),
        .arg_count = 5,
        .args = {{{"schedule", Access::write},
                  {"kv_lengths", Access::read},
                  {"cu_seqlens_q", Access::read},
                  {"is_prefill", Access::read},
                  {"tail_begin", Access::read}}},
    }};

inline constexpr Kernel<abi::AttentionMergeSpec, abi::AttentionMergeParams> kAttentionMerge{{
    .name = "attention_merge",
    .params_bytes = sizeof(abi::AttentionMergeParams),
    .arg_count = 4,
    .args = {{{"partial", Access::read},
              {"out", Access::write},
              {"lse", Access::write},
              {"sink_logits", Access::read}}},
}};

// Values of one moment: a graph that kept them would repeat that moment.
inline constexpr Kernel<abi::KvExtendSpec, abi::KvExtendParams> kKvExtend{{
    .name = "kv_extend",
    .params_bytes = sizeof(abi::KvExtendParams),
    .arg_count = 2,
    .args = {{{"state", Access::write}, {"positions", Access::write}}},
    .once = true,
}};

// k, v and where they are stored, for kv_append and, after its own, rope_append. Sinks and the
// tail's ring of K, and those of V, are one argument each: "near".
constexpr std::array<ArgInfo, kMaxArgs> with_stored_args(std::initializer_list<ArgInfo> own) {
  constexpr ArgInfo kStored[] = {{"k", Access::read},
                                 {"k_codes", Access::read_write, true},
                                 {"k_scales", Access::read_write, true},
                                 {"k_near", Access::write},
                                 {"v", Access::read},
                                 {"v_codes", Access::read_write, true},
                                 {"v_scales", Access::read_write, true},
                                 {"v_near", Access::write}};
  std::array<ArgInfo, kMaxArgs> args{};
  size_t count = 0;
  for (const ArgInfo& arg : own) args[count++] = arg;
  for (const ArgInfo& arg : kStored) args[count++] = arg;
  return args;
}

inline constexpr Kernel<abi::KvAppendSpec, abi::KvAppendParams> kKvAppend{{
    .name = "kv_append",
    .params_bytes = sizeof(abi::KvAppendParams),
    .arg_count = 9,
    .args = with_stored_args({{"state", Access::read}}),
}};

// As kv_quantize: neighbours in a tile keep their bits.
inline constexpr Kernel<abi::KvWriteSpec, abi::KvWriteParams> kKvWrite{{
    .name = "kv_write",
    .params_bytes = sizeof(abi::KvWriteParams),
    .arg_count = 7,
    .args = {{{"k", Access::read},
              {"k_codes", Access::read_write, true},
              {"k_scales", Access::read_write, true},
              {"v", Access::read},
              {"v_codes", Access::read_write, true},
              {"v_scales", Access::read_write, true},
              {"slots", Access::read}}},
}};

// "where" is a cache's state or a list of slots. Pages have no "near".
inline constexpr Kernel<abi::RopeAppendSpec, abi::RopeAppendParams> kRopeAppend{{
    .name = "rope_append",
    .params_bytes = sizeof(abi::RopeAppendParams),
    .arg_count = 16,
    .args = with_stored_args({{"q", Access::read},
                              {"positions", Access::read},
                              {"q_out", Access::write},
                              {"frequencies", Access::read},
                              {"factors", Access::read},
                              {"q_weight", Access::read},
                              {"k_weight", Access::read},
                              {"where", Access::read}}),
}};

inline constexpr Kernel<abi::KvPageCopySpec, abi::KvPageCopyParams> kKvPageCopy{{
    .name = "kv_page_copy",
    .params_bytes = sizeof(abi::KvPageCopyParams),
    .arg_count = 3,
    .args = {{{"pages", Access::read_write}, {"from", Access::read}, {"to", Access::read}}},
}};

inline constexpr Kernel<abi::BytesCopySpec, abi::BytesCopyParams> kBytesCopy{{
    .name = "bytes_copy",
    .params_bytes = sizeof(abi::BytesCopyParams),
    .arg_count = 2,
    .args = {{{"from", Access::read}, {"to", Access::write}}},
}};

// Values of one moment, as kv_extend's.
inline constexpr Kernel<abi::WordsWriteSpec, abi::WordsWriteParams> kWordsWrite{{
    .name = "words_write",
    .params_bytes = sizeof(abi::WordsWriteParams),
    .arg_count = 1,
    .args = {{{"to", Access::write}}},
    .once = true,
}};

}  // namespace gyre
