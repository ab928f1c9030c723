#pragma once
// The contract between ops and backends, on one page. An op names a kernel and hands over Spec,
// Params and Args; a backend has a table from kernels to code. Neither knows the other.

#include <initializer_list>

#include "abi/attention.h"
#include "abi/attention_plan.h"
#include "abi/bytes_copy.h"
#include "abi/hadamard.h"
#include "abi/kernel.h"
#include "abi/kv_copy.h"
#include "abi/kv_dequantize.h"
#include "abi/kv_extend.h"
#include "abi/kv_feedback.h"
#include "abi/rope.h"
#include "abi/rope_append.h"
#include "abi/words_write.h"
#include "abi/write.h"

namespace gyre {

inline constexpr Kernel<abi::KvCopySpec, abi::KvCopyParams> kKvCopy{{
    .name = "kv_copy",
    .params_bytes = sizeof(abi::KvCopyParams),
    .arg_count = 4,
    .args = {{{"k", kArgRead}, {"k_cache", kArgWrite}, {"v", kArgRead}, {"v_cache", kArgWrite}}},
}};

// rope and norm_rope; absent outputs and weights are null.
inline constexpr Kernel<abi::RopeSpec, abi::RopeParams> kRope{{
    .name = "rope",
    .params_bytes = sizeof(abi::RopeParams),
    .arg_count = 11,
    .args = {{{"x", kArgRead},
              {"positions", kArgRead},
              {"out", kArgWrite},
              {"frequencies", kArgRead},
              {"factors", kArgRead},
              {"weight", kArgRead},
              {"second", kArgWrite},
              {"k", kArgRead},
              {"k_out", kArgWrite},
              {"k_weight", kArgRead},
              {"k_second", kArgWrite}}},
}};

// What every write ends with, behind its own arguments: k, v and where they are stored. Writes to
// the caches are read_write: tokens that share a tile of V with new ones keep their bits. Sink
// tokens and tail of K, and those of V, are one argument each: "near". A range and slots in pages
// have no "near".
constexpr std::array<ArgInfo, kMaxArgs> with_stored_args(std::initializer_list<ArgInfo> own,
                                                         bool appended = true) {
  const ArgInfo stored[] = {{"k", kArgRead},
                            {"k_codes", kArgReadWrite, appended},
                            {"k_scales", kArgReadWrite, appended},
                            {"k_near", kArgWrite},
                            {"v", kArgRead},
                            {"v_codes", kArgReadWrite, appended},
                            {"v_scales", kArgReadWrite, appended},
                            {"v_near", kArgWrite}};
  std::array<ArgInfo, kMaxArgs> args{};
  size_t count = 0;
  for (const ArgInfo& arg : own) args[count++] = arg;
  for (const ArgInfo& arg : stored) args[count++] = arg;
  return args;
}

using WriteKernel = Kernel<abi::WriteSpec, abi::WriteParams>;
inline constexpr WriteKernel kKvQuantize{{
    .name = "kv_quantize",
    .params_bytes = sizeof(abi::WriteParams),
    .arg_count = 9,
    .args = with_stored_args({{"where", kArgRead}}, false),
}};
inline constexpr WriteKernel kKvAppend{{
    .name = "kv_append",
    .params_bytes = sizeof(abi::WriteParams),
    .arg_count = 9,
    .args = with_stored_args({{"state", kArgRead}}),
}};
inline constexpr WriteKernel kKvWrite{{
    .name = "kv_write",
    .params_bytes = sizeof(abi::WriteParams),
    .arg_count = 9,
    .args = with_stored_args({{"slots", kArgRead}}),
}};

inline constexpr Kernel<abi::KvDequantizeSpec, abi::KvDequantizeParams> kKvDequantize{{
    .name = "kv_dequantize",
    .params_bytes = sizeof(abi::KvDequantizeParams),
    .arg_count = 3,
    .args = {{{"codes", kArgRead}, {"scales", kArgRead}, {"out", kArgWrite}}},
}};

// Rows to calibrated rows, which the writers below take in place of k and v; what is absent is
// null.
inline constexpr Kernel<abi::KvFeedbackSpec, abi::KvFeedbackParams> kKvFeedback{{
    .name = "kv_feedback",
    .params_bytes = sizeof(abi::KvFeedbackParams),
    .arg_count = 14,
    .args = {{{"k", kArgRead},
              {"k_matrix", kArgRead},
              {"k_inverse", kArgRead},
              {"k_mean", kArgRead},
              {"k_factor", kArgRead},
              {"k_diagonal", kArgRead},
              {"k_calibrated", kArgWrite},
              {"v", kArgRead},
              {"v_matrix", kArgRead},
              {"v_inverse", kArgRead},
              {"v_mean", kArgRead},
              {"v_factor", kArgRead},
              {"v_diagonal", kArgRead},
              {"v_calibrated", kArgWrite}}},
}};

inline constexpr Kernel<abi::KvTransformSpec, abi::KvTransformParams> kKvTransform{{
    .name = "kv_transform",
    .params_bytes = sizeof(abi::KvTransformParams),
    .arg_count = 5,
    .args = {{{"x", kArgRead},
              {"matrix", kArgRead},
              {"before", kArgRead},
              {"after", kArgRead},
              {"out", kArgWrite}}},
}};

inline constexpr Kernel<abi::HadamardSpec, abi::HadamardParams> kHadamard{{
    .name = "hadamard",
    .params_bytes = sizeof(abi::HadamardParams),
    .arg_count = 2,
    .args = {{{"x", kArgRead}, {"out", kArgWrite}}},
}};

// In the order of abi::AttentionArg.
inline constexpr std::array<ArgInfo, kMaxArgs> kAttentionArgs = {{{"q", kArgRead},
                                                                  {"k_codes", kArgRead},
                                                                  {"k_scales", kArgRead},
                                                                  {"v_codes", kArgRead},
                                                                  {"v_scales", kArgRead},
                                                                  {"out", kArgWrite},
                                                                  {"lse", kArgWrite},
                                                                  {"sink_logits", kArgRead},
                                                                  {"alibi_slopes", kArgRead},
                                                                  {"tree_mask", kArgRead},
                                                                  {"partial", kArgReadWrite},
                                                                  {"state", kArgRead},
                                                                  {"table", kArgRead},
                                                                  {"kv_lengths", kArgRead},
                                                                  {"cu_seqlens_q", kArgRead},
                                                                  {"is_prefill", kArgRead}}};

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
        .args = {{{"schedule", kArgWrite},
                  {"kv_lengths", kArgRead},
                  {"cu_seqlens_q", kArgRead},
                  {"is_prefill", kArgRead},
                  {"tail_begin", kArgRead}}},
    }};

inline constexpr Kernel<abi::AttentionMergeSpec, abi::AttentionMergeParams> kAttentionMerge{{
    .name = "attention_merge",
    .params_bytes = sizeof(abi::AttentionMergeParams),
    .arg_count = 4,
    .args = {{{"partial", kArgRead},
              {"out", kArgWrite},
              {"lse", kArgWrite},
              {"sink_logits", kArgRead}}},
}};

// Values of one moment: a graph that kept them would repeat that moment.
inline constexpr Kernel<abi::KvExtendSpec, abi::KvExtendParams> kKvExtend{{
    .name = "kv_extend",
    .params_bytes = sizeof(abi::KvExtendParams),
    .arg_count = 2,
    .args = {{{"state", kArgWrite}, {"positions", kArgWrite}}},
    .once = true,
}};

// "where" is a cache's state or a list of slots.
inline constexpr Kernel<abi::RopeAppendSpec, abi::RopeAppendParams> kRopeAppend{{
    .name = "rope_append",
    .params_bytes = sizeof(abi::RopeAppendParams),
    .arg_count = 16,
    .args = with_stored_args({{"q", kArgRead},
                              {"positions", kArgRead},
                              {"q_out", kArgWrite},
                              {"frequencies", kArgRead},
                              {"factors", kArgRead},
                              {"q_weight", kArgRead},
                              {"k_weight", kArgRead},
                              {"where", kArgRead}}),
}};

inline constexpr Kernel<abi::KvPageCopySpec, abi::KvPageCopyParams> kKvPageCopy{{
    .name = "kv_page_copy",
    .params_bytes = sizeof(abi::KvPageCopyParams),
    .arg_count = 3,
    .args = {{{"pages", kArgReadWrite}, {"from", kArgRead}, {"to", kArgRead}}},
}};

inline constexpr Kernel<abi::BytesCopySpec, abi::BytesCopyParams> kBytesCopy{{
    .name = "bytes_copy",
    .params_bytes = sizeof(abi::BytesCopyParams),
    .arg_count = 2,
    .args = {{{"from", kArgRead}, {"to", kArgWrite}}},
}};

// Values of one moment, as kv_extend's.
inline constexpr Kernel<abi::WordsWriteSpec, abi::WordsWriteParams> kWordsWrite{{
    .name = "words_write",
    .params_bytes = sizeof(abi::WordsWriteParams),
    .arg_count = 1,
    .args = {{{"to", kArgWrite}}},
    .once = true,
}};

}  // namespace gyre
