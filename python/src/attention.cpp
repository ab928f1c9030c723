#include "kv_buffer.h"

namespace gyre::python {
namespace {

void record_attention(Encoder& encoder, const Operand& q, const BoundKvBuffer& k_cache,
                      const BoundKvBuffer& v_cache, const Operand& out, const OptionalOperand& lse,
                      const OptionalOperand& sink_logits, const OptionalOperand& alibi_slopes,
                      const OptionalOperand& tree_mask, uint64_t length, uint64_t ring_start,
                      std::optional<float> scale, bool causal, uint64_t window, float soft_cap) {
  const Operands operand(encoder, "attention");
  const AttentionInputs inputs{.q = operand("q", q),
                               .k_cache = k_cache.buffer,
                               .v_cache = v_cache.buffer,
                               .out = operand("out", out),
                               .lse = operand("lse", lse)};
  const AttentionOptions options{.length = length,
                                 .ring_start = ring_start,
                                 .scale = scale,
                                 .mask = {.causal = causal,
                                          .window = window,
                                          .soft_cap = soft_cap,
                                          .alibi_slopes = operand("alibi_slopes", alibi_slopes),
                                          .tree_mask = operand("tree_mask", tree_mask),
                                          .sink_logits = operand("sink_logits", sink_logits)}};
  without_gil([&] { attention(encoder, inputs, options); });
}

void record_attention_partial(Encoder& encoder, const Operand& q, const BoundKvBuffer& k_cache,
                              const BoundKvBuffer& v_cache, const Operand& partial,
                              const OptionalOperand& alibi_slopes, const OptionalOperand& tree_mask,
                              uint64_t length, uint64_t ring_start, std::optional<float> scale,
                              bool causal, uint64_t window, float soft_cap) {
  const Operands operand(encoder, "attention_partial");
  const AttentionPartialInputs inputs{.q = operand("q", q),
                                      .k_cache = k_cache.buffer,
                                      .v_cache = v_cache.buffer,
                                      .partial = operand("partial", partial)};
  const AttentionOptions options{.length = length,
                                 .ring_start = ring_start,
                                 .scale = scale,
                                 .mask = {.causal = causal,
                                          .window = window,
                                          .soft_cap = soft_cap,
                                          .alibi_slopes = operand("alibi_slopes", alibi_slopes),
                                          .tree_mask = operand("tree_mask", tree_mask)}};
  without_gil([&] { attention_partial(encoder, inputs, options); });
}

void record_attention_merge(Encoder& encoder, const Operand& partial, const Operand& out,
                            const OptionalOperand& lse, const OptionalOperand& sink_logits) {
  const Operands operand(encoder, "attention_merge");
  const AttentionMergeInputs inputs{.partial = operand("partial", partial),
                                    .out = operand("out", out),
                                    .lse = operand("lse", lse),
                                    .sink_logits = operand("sink_logits", sink_logits)};
  without_gil([&] { attention_merge(encoder, inputs); });
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def(
      "attention", record_attention, "encoder"_a, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a,
      "lse"_a = nb::none(), "sink_logits"_a = nb::none(), "alibi_slopes"_a = nb::none(),
      "tree_mask"_a = nb::none(), nb::kw_only(), "length"_a, "ring_start"_a = 0,
      "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0, "soft_cap"_a = 0.0f,
      "softmax(scale * q k^T, capped, biased, masked) v over a cache.\n\n"
      "q: [tokens, heads, head_dim], f32, f16 or bf16. k_cache, v_cache: KvBuffers of any "
      "format, heads is a multiple of theirs. out: [tokens, heads, head_dim of V]. lse: f32 "
      "[tokens, heads], log of the softmax's denominator, written. sink_logits: f32 [heads], one "
      "more logit per head, whose value is 0. alibi_slopes: f32 [heads], ALiBi. tree_mask: u8 "
      "[tokens, "
      "tokens], query i sees new token j if not 0; instead of causal. length: keys in the "
      "cache, those of the queries included; the queries are the newest tokens. ring_start: "
      "slot of key 0. window: only the newest so many keys; 0: all. soft_cap: logits become "
      "cap * tanh(logit / cap); 0: off.");
  module.def(
      "attention_partial", record_attention_partial, "encoder"_a, "q"_a, "k_cache"_a, "v_cache"_a,
      "partial"_a, "alibi_slopes"_a = nb::none(), "tree_mask"_a = nb::none(), nb::kw_only(),
      "length"_a, "ring_start"_a = 0, "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0,
      "soft_cap"_a = 0.0f,
      "The first step of attention(), for merging what was computed apart.\n\n"
      "partial: f32, contiguous, attention_partial_shape(); written. The keys are cut into as "
      "many splits as it has. The rest as in attention().");
  module.def(
      "attention_merge", record_attention_merge, "encoder"_a, "partial"_a, "out"_a,
      "lse"_a = nb::none(), "sink_logits"_a = nb::none(),
      "The second step. partial: [splits, tokens, heads, v_head_dim + 2] f32, from anywhere. "
      "out: [tokens, heads, v_head_dim].");
  module.def(
      "attention_partial_shape",
      [](uint64_t splits, const Sizes& q_shape, uint64_t v_head_dim) {
        return tuple_of(attention_partial_shape(splits, dims_of(q_shape), v_head_dim));
      },
      "splits"_a, "q_shape"_a, "v_head_dim"_a,
      nb::sig(
          "def attention_partial_shape(splits: int, q_shape: Sequence[int], v_head_dim: int) -> "
          "tuple[int, ...]"),
      "(splits, tokens, heads, v_head_dim + 2)");
}

}  // namespace gyre::python
