#include "kv_buffer.h"
#include "kv_pages.h"

namespace gyre::python {
namespace {

// Rows of q with the coordinates of V. Another rank is attention's to refuse.
Dims out_shape(const Tensor& q, uint64_t v_head_dim) {
  return q.rank() == 3 ? Dims{q.shape(0), q.shape(1), v_head_dim} : Dims{};
}

Operand record_attention(Encoder& encoder, const Operand& q, const BoundKvBuffer& k_cache,
                         const BoundKvBuffer& v_cache, const OptionalOperand& out,
                         const OptionalOperand& lse, const OptionalOperand& sink_logits,
                         const OptionalOperand& alibi_slopes, const OptionalOperand& tree_mask,
                         uint64_t length, uint64_t ring_start, std::optional<float> scale,
                         bool causal, uint64_t window, float soft_cap, bool latent,
                         BoundScratch* scratch) {
  const Operands operand(encoder, "attention");
  const UsedScratch memory(scratch, "attention");
  const Tensor queries = operand("q", q);
  const BoundKvBuffer& values = latent ? k_cache : v_cache;
  const Written to = operand.written("out", out, queries.dtype(),
                                     out_shape(queries, values.buffer.shape.head_dim));
  const AttentionInputs inputs{.q = queries,
                               .k_cache = k_cache.buffer,
                               .v_cache = v_cache.buffer,
                               .out = to.tensor,
                               .lse = operand("lse", lse),
                               .latent = latent,
                               .scratch = memory.tensor()};
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
  return to.result;
}

Operand record_attention_partial(Encoder& encoder, const Operand& q, const BoundKvBuffer& k_cache,
                                 const BoundKvBuffer& v_cache, const OptionalOperand& partial,
                                 const OptionalOperand& alibi_slopes,
                                 const OptionalOperand& tree_mask, uint64_t length,
                                 uint64_t ring_start, std::optional<float> scale, bool causal,
                                 uint64_t window, float soft_cap, bool latent, uint64_t splits) {
  const Operands operand(encoder, "attention_partial");
  const Tensor queries = operand("q", q);
  const uint64_t v_head_dim = (latent ? k_cache : v_cache).buffer.shape.head_dim;
  const Written to = operand.written(
      "partial", partial, DType::f32,
      queries.rank() == 3 ? attention_partial_shape(splits, queries.shape(), v_head_dim) : Dims{});
  const AttentionPartialInputs inputs{.q = queries,
                                      .k_cache = k_cache.buffer,
                                      .v_cache = v_cache.buffer,
                                      .partial = to.tensor,
                                      .latent = latent};
  const AttentionOptions options{.length = length,
                                 .ring_start = ring_start,
                                 .scale = scale,
                                 .mask = {.causal = causal,
                                          .window = window,
                                          .soft_cap = soft_cap,
                                          .alibi_slopes = operand("alibi_slopes", alibi_slopes),
                                          .tree_mask = operand("tree_mask", tree_mask)}};
  without_gil([&] { attention_partial(encoder, inputs, options); });
  return to.result;
}

Operand record_attention_merge(Encoder& encoder, const Operand& partial, const OptionalOperand& out,
                               const OptionalOperand& lse, const OptionalOperand& sink_logits) {
  const Operands operand(encoder, "attention_merge");
  const Tensor states = operand("partial", partial);
  const bool valid = states.rank() == 4 && states.shape(3) > 2;
  const Written to =
      operand.written("out", out, DType::f32,
                      valid ? Dims{states.shape(1), states.shape(2), states.shape(3) - 2} : Dims{});
  const AttentionMergeInputs inputs{.partial = states,
                                    .out = to.tensor,
                                    .lse = operand("lse", lse),
                                    .sink_logits = operand("sink_logits", sink_logits)};
  without_gil([&] { attention_merge(encoder, inputs); });
  return to.result;
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def(
      "attention", record_attention, "encoder"_a, "q"_a, "k_cache"_a, "v_cache"_a,
      "out"_a = nb::none(), "lse"_a = nb::none(), "sink_logits"_a = nb::none(),
      "alibi_slopes"_a = nb::none(), "tree_mask"_a = nb::none(), nb::kw_only(), "length"_a,
      "ring_start"_a = 0, "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0,
      "soft_cap"_a = 0.0f, "latent"_a = false, "scratch"_a = nb::none(),
      "Records softmax(scale * q k^T) v over a cache and returns out.\n\n"
      "q is [tokens, heads, head_dim], f32, f16 or bf16, and holds the newest tokens. k_cache and "
      "v_cache are KvBuffers of any format; heads must be a multiple of their kv_heads. out is "
      "[tokens, heads, head_dim of V]; if you leave it out, a gyre.Tensor of q's dtype is made. "
      "lse, if given, is f32 [tokens, heads] and receives the log-sum-exp of each row.\n\n"
      "length counts the keys in the cache, including those of the queries. ring_start is the slot "
      "of the oldest key. scale defaults to 1 / sqrt(head_dim). With causal, a query sees keys up "
      "to its own. window limits a query to its newest keys, its own included; 0 means all. "
      "soft_cap c turns a logit into c * tanh(logit / c); 0 turns it off. alibi_slopes, f32 "
      "[heads], adds slope * (key - query) to a logit. tree_mask, u8 [tokens, tokens], replaces "
      "causal: query i sees new token j where the entry is not 0. sink_logits, f32 [heads], adds "
      "one logit per head whose value is 0.\n\n"
      "With latent (MLA), k_cache holds the latent, which is V as well, and v_cache the rotary "
      "part of K, both with one KV head. q then has the coordinates of the latent, followed by the "
      "rotary ones; out has those of the latent; scale must be given.\n\n"
      "scratch is an AttentionScratch that you keep from call to call; on CUDA a long prompt over "
      "levels is slower without one.");
  module.def("attention_partial", record_attention_partial, "encoder"_a, "q"_a, "k_cache"_a,
             "v_cache"_a, "partial"_a = nb::none(), "alibi_slopes"_a = nb::none(),
             "tree_mask"_a = nb::none(), nb::kw_only(), "length"_a, "ring_start"_a = 0,
             "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0, "soft_cap"_a = 0.0f,
             "latent"_a = false, "splits"_a = 1,
             "Records the first half of attention(), for results that are merged later, and "
             "returns partial.\n\n"
             "partial is f32, contiguous, of shape attention_partial_shape(). The keys are cut "
             "into as many splits as it has; if you leave it out, a gyre.Tensor with `splits` "
             "splits is made. The other arguments are those of attention(); pass sink_logits to "
             "attention_merge().");
  module.def(
      "attention_merge", record_attention_merge, "encoder"_a, "partial"_a, "out"_a = nb::none(),
      "lse"_a = nb::none(), "sink_logits"_a = nb::none(),
      "Records the second half of attention() and returns out.\n\n"
      "partial is f32 [splits, tokens, heads, v_head_dim + 2], from any number of "
      "attention_partial() calls. out is [tokens, heads, v_head_dim]; if you leave it out, an f32 "
      "gyre.Tensor is made. lse and sink_logits are those of attention().");
  module.def(
      "supports_attention",
      [](const DeviceLike& device, const std::string& q, const std::string& k, const std::string& v,
         const std::string& out, bool paged, bool latent) {
        return supports(device_of(device), AttentionTypes{.q = dtype_named(q),
                                                          .k = kv_format(k),
                                                          .v = kv_format(v),
                                                          .out = dtype_named(out),
                                                          .paged = paged,
                                                          .latent = latent});
      },
      "device"_a, nb::kw_only(), "q"_a = "f32", "k"_a = "f16", "v"_a = "f16", "out"_a = "f32",
      "paged"_a = false, "latent"_a = false,
      "Returns whether a device has kernels for attention() with these dtypes and formats, or with "
      "paged for paged_attention().");
  module.def(
      "attention_partial_shape",
      [](uint64_t splits, const Sizes& q_shape, uint64_t v_head_dim) {
        return tuple_of(attention_partial_shape(splits, dims_of(q_shape), v_head_dim));
      },
      "splits"_a, "q_shape"_a, "v_head_dim"_a,
      nb::sig(
          "def attention_partial_shape(splits: int, q_shape: Sequence[int], v_head_dim: int) -> "
          "tuple[int, ...]"),
      "Returns the shape of attention_partial's result: (splits, tokens, heads, v_head_dim + 2).");
}

}  // namespace gyre::python
