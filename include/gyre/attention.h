#pragma once

#include <cstdint>
#include <optional>

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/format.h"
#include "gyre/pages.h"
#include "gyre/tensor.h"

namespace gyre {

// Which keys a query sees, and what happens to its logits before the softmax. Every attention call
// takes one. Undefined tensors are left out.
struct AttentionMask {
  bool causal = true;     // query i sees keys up to its own
  uint64_t window = 0;    // only the newest `window` keys, the query's own included; 0: all
  float soft_cap = 0.0f;  // logits become cap * tanh(logit / cap); 0: off
  Tensor alibi_slopes{};  // [heads] f32: slope * (key - query) is added to the logit
  Tensor tree_mask{};     // [tokens, tokens] u8: query i sees new token j if not 0; replaces causal
  Tensor sink_logits{};   // [heads] f32: one more logit per head, whose value is 0
};

// Keys are numbered from the oldest, 0, to the newest, length - 1; the queries are the newest
// tokens: query i of T stands at key length - T + i. Undefined tensors are left out.
struct AttentionInputs {
  Tensor q{};          // [tokens, heads, head_dim], f32, f16 or bf16, head_dim contiguous
  KvBuffer k_cache{};  // any format; heads is a multiple of its kv_heads
  KvBuffer v_cache{};  // any format, independent of K's; its head_dim may differ from K's
  Tensor out{};        // [tokens, heads, head_dim of V], f32, f16 or bf16
  Tensor lse{};        // [tokens, heads] f32: log of the softmax's denominator, the sink included
  // Latent attention (MLA): k_cache holds the latent, which is V as well, v_cache the rotary part
  // of K, both with one KV head. q has the coordinates of the latent, then the rotary ones; out has
  // the latent's. `scale` must be given, a tree_mask is refused. See docs/latent.md.
  bool latent = false;
  // Scratch memory that the caller keeps from call to call; it grows. Pass an undefined tensor, or
  // what an earlier call made of it and nobody else wrote to. Calls that use it run one after the
  // other, whatever their shapes; a call that finds it large enough allocates nothing. Calls over
  // latent rows and others need one each. Null: each call takes its own, and on CUDA a long prompt
  // over levels is slower, because it takes at most 32 MiB.
  Tensor* scratch = nullptr;
};

struct AttentionOptions {
  uint64_t length = 0;           // keys in the cache, those of the queries included; 0 is valid
  uint64_t ring_start = 0;       // slot of key 0; key j lies in slot (ring_start + j) mod capacity
  std::optional<float> scale{};  // multiplies the dot product; 1 / sqrt(head_dim) if not given,
                                 // latent attention has no default
  AttentionMask mask{};
};

// softmax(scale * q k^T, capped, biased, masked) v. Plain q in, plain output out: whatever the
// cache rotates is rotated back. A query that sees nothing gives 0 and -inf. Slots outside the
// bounds do not matter, whatever they hold. The result does not depend on the number of threads.
// Sums are f32; the CPU rounds queries and weights to 16 bits over levels, and probabilities to f16
// over f16 values where they fit. A NaN or infinity among what a query sees shows in its output,
// unless the key's probability is 0.
GYRE_API void attention(Encoder& encoder, const AttentionInputs& inputs,
                        const AttentionOptions& options);

// Queries of several sequences over pages. Tables, lengths and query ranges are in device memory:
// the host knows upper bounds only, and a recorded call serves every batch within them.
struct PagedAttentionInputs {
  Tensor q{};           // [tokens, heads, head_dim]: the newest tokens of every sequence
  KvPages pages{};      // of one layer
  Tensor page_table{};  // i32 [sequences, width]: key j of a sequence lies in page table[j /
                        // page_tokens]; rows any stride, entries contiguous
  Tensor kv_lengths{};  // i32 [sequences]: keys, those of the queries included
  Tensor
      cu_seqlens_q{};   // i32 [sequences + 1]: rows of q of sequence s are [begin[s], begin[s + 1])
  Tensor is_prefill{};  // u8 [sequences], not 0: see below; may be undefined
  Tensor out{};         // [tokens, heads, v_head_dim]; rows of no sequence are not written
  Tensor lse{};         // [tokens, heads] f32, as in AttentionInputs
  // As in AttentionInputs; both may use the same. A call that finds it large enough can be recorded
  // while a CUDA stream is captured.
  Tensor* scratch = nullptr;
  Tensor schedule{};  // attention_schedule()'s; undefined: the call makes its own
};

struct PagedAttentionOptions {
  uint64_t max_query_length = 1;  // of one sequence
  // No sequence has fewer queries. A step of draft tokens alone that says so saves a command; one
  // with fewer queries is computed all the same.
  uint64_t min_query_length = 1;
  uint64_t max_kv_length = 0;    // of one sequence; 0: width * page_tokens
  std::optional<float> scale{};  // as in AttentionOptions
  AttentionMask mask{};          // no tree_mask; pages wholly below a window are not read
  // CUDA: the command ahead of the call writes no keys but those of the call's own tokens.
  // Older ones may then be loaded while it still runs. As in a decode step: append, then attend.
  bool settled_keys = false;
};

// A row's bits depend on its sequence's keys, its own position and how it is computed, and on
// nothing else: not on page numbers, on the rest of the batch, or on where in the batch it is.
// Sequences with a few queries are computed as decoding does; those with many, and those marked in
// `is_prefill`, as prompts are: then the bits do not depend either on the number of queries, so
// that a prompt may come in any chunks. Device memory cannot be checked before: a sequence with a
// length or query range beyond the bounds gets NaN in its rows of out and lse; of a table entry
// that is no page, the rows that see its keys do, and others of the sequence may. Nothing outside
// the tensors is touched. A range that begins below 0 or ends before it begins has no rows; rows
// that two ranges claim may hold what either gives.
GYRE_API void attention(Encoder& encoder, const PagedAttentionInputs& inputs,
                        const PagedAttentionOptions& options);

// Which multiprocessor works on which keys, for attention over pages on CUDA. An engine makes it
// once per step, after the step's lengths and query ranges are in device memory, and hands it to
// the attention of every layer that has the same shape of pages, heads, window and options. It
// saves the time to find this out for each layer; results are the same, bit for bit. A sequence
// whose length or query range changed since gets NaN; a call with other options than the schedule's
// computes no rows.
struct AttentionScheduleInputs {
  KvPages pages{};                 // of one of the layers
  uint64_t tokens = 0, heads = 0;  // of the calls' q
  DType q_dtype = DType::f16;      // of the calls' q
  Tensor kv_lengths{};             // as in PagedAttentionInputs
  Tensor cu_seqlens_q{};
  Tensor is_prefill{};
};
// Options as the calls have them, max_kv_length given. Writes to `memory`, if that is large enough,
// or to new memory; returns it. Undefined where the device's kernels read no schedule.
GYRE_API Tensor attention_schedule(Encoder& encoder, const AttentionScheduleInputs& inputs,
                                   const PagedAttentionOptions& options, const Tensor& memory = {});

// attention_partial and attention_merge are attention in two steps, to merge parts that were
// computed separately. Keys are cut into as many splits as `partial` has; each gives {sum of
// exp(logit - max) v, max, sum of exp(logit - max)}; a split without keys gives {0, -inf, 0}. The
// merge takes `sink_logits`; attention_partial refuses a mask that has them.
struct AttentionPartialInputs {
  Tensor q{};
  KvBuffer k_cache{};
  KvBuffer v_cache{};
  Tensor partial{};     // f32, contiguous, attention_partial_shape()
  bool latent = false;  // as in AttentionInputs; v_head_dim of `partial` is the latent's
};

GYRE_API void attention_partial(Encoder& encoder, const AttentionPartialInputs& inputs,
                                const AttentionOptions& options);

struct AttentionMergeInputs {
  Tensor partial{};  // [splits, tokens, heads, v_head_dim + 2]; from anywhere, in any number
  Tensor out{};
  Tensor lse{};
  Tensor sink_logits{};
};

GYRE_API void attention_merge(Encoder& encoder, const AttentionMergeInputs& inputs);

// [splits, tokens, heads, v_head_dim + 2]: the weighted sum, then the maximum, then the sum.
GYRE_API Dims attention_partial_shape(uint64_t splits, const Dims& q_shape, uint64_t v_head_dim);

struct AttentionTypes {
  DType q = DType::f32;
  KvFormat k = KvFormat::f16;
  KvFormat v = KvFormat::f16;
  DType out = DType::f32;
  bool paged = false;
  bool latent = false;
};

// Whether a device has kernels for these types. A call without throws; it never falls back.
GYRE_API bool supports(const Device& device, const AttentionTypes& types);

}  // namespace gyre
