#pragma once
// The contract between ops and backends, on one page. An op names a kernel and hands over Spec,
// Params and Args; a backend has a table from kernels to code. Neither knows the other.

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

inline constexpr Kernel<abi::KvCopySpec, abi::KvCopyParams> kKvCopy{
    "kv_copy", {reads("k"), writes("k_cache"), reads("v"), writes("v_cache")}};

// rope and norm_rope; absent outputs and weights are null.
inline constexpr Kernel<abi::RopeSpec, abi::RopeParams> kRope{
    "rope",
    {reads("x"), reads("positions"), writes("out"), reads("frequencies"), reads("factors"),
     reads("weight"), writes("second"), reads("k"), writes("k_out"), reads("k_weight"),
     writes("k_second")}};

// What every write ends with, behind its own arguments: k, v and where they are stored. Writes to
// the caches are read_write: tokens that share a tile of V with new ones keep their bits. Sink
// tokens and tail of K, and those of V, are one argument each: "k_f16" and "v_f16". A range and
// slots in pages have none.
constexpr ArgList with_stored_args(ArgList args, bool appended = true) {
  const auto changes = [&](const char* name) { return ArgInfo{name, kArgReadWrite, appended}; };
  args.append({reads("k"), changes("k_codes"), changes("k_scales"), writes("k_f16"), reads("v"),
               changes("v_codes"), changes("v_scales"), writes("v_f16")});
  return args;
}

using WriteKernel = Kernel<abi::WriteSpec, abi::WriteParams>;
inline constexpr WriteKernel kKvQuantize{"kv_quantize", with_stored_args({reads("where")}, false)};
inline constexpr WriteKernel kKvAppend{"kv_append", with_stored_args({reads("state")})};
inline constexpr WriteKernel kKvWrite{"kv_write", with_stored_args({reads("slots")})};

inline constexpr Kernel<abi::KvDequantizeSpec, abi::KvDequantizeParams> kKvDequantize{
    "kv_dequantize", {reads("codes"), reads("scales"), writes("out")}};

// Rows to calibrated rows, which the writers below take in place of k and v; what is absent is
// null.
inline constexpr Kernel<abi::KvFeedbackSpec, abi::KvFeedbackParams> kKvFeedback{
    "kv_feedback",
    {reads("k"), reads("k_matrix"), reads("k_inverse"), reads("k_mean"), reads("k_factor"),
     reads("k_diagonal"), writes("k_calibrated"), reads("v"), reads("v_matrix"), reads("v_inverse"),
     reads("v_mean"), reads("v_factor"), reads("v_diagonal"), writes("v_calibrated")}};

inline constexpr Kernel<abi::KvTransformSpec, abi::KvTransformParams> kKvTransform{
    "kv_transform", {reads("x"), reads("matrix"), reads("before"), reads("after"), writes("out")}};

inline constexpr Kernel<abi::HadamardSpec, abi::HadamardParams> kHadamard{
    "hadamard", {reads("x"), writes("out")}};

// In the order of abi::AttentionArg.
inline constexpr ArgList kAttentionArgs = {
    reads("q"),         reads("k_codes"),     reads("k_scales"),
    reads("v_codes"),   reads("v_scales"),    writes("out"),
    writes("lse"),      reads("sink_logits"), reads("alibi_slopes"),
    reads("tree_mask"), updates("partial"),   reads("state"),
    reads("table"),     reads("kv_lengths"),  reads("cu_seqlens_q"),
    reads("is_prefill")};

// Either out (and lse, sink_logits) or partial; what is absent is null.
using PlannedAttention = Kernel<abi::AttentionSpec, abi::AttentionParams, abi::AttentionProblem>;
inline constexpr PlannedAttention kAttention{"attention", kAttentionArgs};

// As kAttention, for few rows over many keys; it reduces its splits itself. A plan says when a
// device takes it.
inline constexpr Kernel<abi::AttentionDecodeSpec, abi::AttentionParams> kAttentionDecode{
    "attention_decode", kAttentionArgs};

// As kAttention, for many rows on tensor cores, where a device has them.
inline constexpr Kernel<abi::AttentionRowsSpec, abi::AttentionParams> kAttentionManyRows{
    "attention_many_rows", kAttentionArgs};

// As kAttention, for latent attention; `partial` is the kernel's scratch memory. A plan says when a
// device takes it.
inline constexpr Kernel<abi::AttentionLatentSpec, abi::AttentionParams> kAttentionLatent{
    "attention_latent", kAttentionArgs};

// Who works on what, for every call over the same pages, lengths and masks.
inline constexpr Kernel<abi::AttentionScheduleSpec, abi::AttentionScheduleParams>
    kAttentionSchedule{"attention_schedule",
                       {writes("schedule"), reads("kv_lengths"), reads("cu_seqlens_q"),
                        reads("is_prefill"), reads("tail_begin")}};

inline constexpr Kernel<abi::AttentionMergeSpec, abi::AttentionMergeParams> kAttentionMerge{
    "attention_merge", {reads("partial"), writes("out"), writes("lse"), reads("sink_logits")}};

// Values of one moment: a graph that kept them would repeat that moment.
inline constexpr Kernel<abi::KvExtendSpec, abi::KvExtendParams> kKvExtend{
    "kv_extend", {writes("state"), writes("positions")}, true};

// "where" is a cache's state or a list of slots.
inline constexpr Kernel<abi::RopeAppendSpec, abi::RopeAppendParams> kRopeAppend{
    "rope_append",
    with_stored_args({reads("q"), reads("positions"), writes("q_out"), reads("frequencies"),
                      reads("factors"), reads("q_weight"), reads("k_weight"), reads("where")})};

inline constexpr Kernel<abi::KvPageCopySpec, abi::KvPageCopyParams> kKvPageCopy{
    "kv_page_copy", {updates("pages"), reads("from"), reads("to")}};

inline constexpr Kernel<abi::BytesCopySpec, abi::BytesCopyParams> kBytesCopy{
    "bytes_copy", {reads("from"), writes("to")}};

// Values of one moment, as kv_extend's.
inline constexpr Kernel<abi::WordsWriteSpec, abi::WordsWriteParams> kWordsWrite{
    "words_write", {writes("to")}, true};

}  // namespace gyre
