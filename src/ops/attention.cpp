#include "gyre/attention.h"

#include <algorithm>

#include "ops/attention_check.h"
#include "ops/attention_dispatch.h"
#include "ops/attention_latent.h"
#include "ops/attention_spec.h"
#include "ops/cache_ops.h"
#include "runtime/device_impl.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

// Memory for a plan that reduces in the kernel, `kept` if that is large enough.
Tensor scratch_of(const Encoder& encoder, const abi::AttentionPlan& plan, const Tensor& kept) {
  const bool reduces = plan.reduce == abi::AttentionReduce::in_kernel;
  return reduces && plan.scratch_floats != 0 ? at_least(encoder.device(), kept, plan.scratch_floats)
                                             : kept;
}

}  // namespace

Dims attention_partial_shape(uint64_t splits, const Dims& q_shape, uint64_t v_head_dim) {
  require(splits != 0, "attention_partial_shape: at least one split");
  require(q_shape.size() == 3, "attention_partial_shape: q must be [tokens, heads, head_dim], got ",
          q_shape);
  require(v_head_dim <= abi::kKvMaxHeadDim, "attention_partial_shape: v_head_dim must be at most ",
          abi::kKvMaxHeadDim, ", got ", v_head_dim);
  return {splits, q_shape[0], q_shape[1], v_head_dim + 2};
}

bool supports(const Device& device, const AttentionTypes& types) try {
  require(impl_of(device) != nullptr, "supports: the device was moved from");
  if (types.latent) return supports_latent(device, types);
  return impl_of(device)->has(
      kAttention.info, spec_key(make_spec(types.q, types.k, types.v, types.out, types.paged)));
} catch (const std::bad_alloc&) {
  out_of_memory("supports");
}

void attention_partial(Encoder& encoder, const AttentionPartialInputs& in,
                       const AttentionOptions& options) try {
  Recording recording(encoder, "attention_partial");
  const AttentionCall call{"attention_partial", in, options};
  check_call(call);
  require(!options.mask.sink_logits.defined(), call.op, ": sink_logits belong to attention_merge");
  check_partial_tensor(call.op, in.partial);
  const Dims shape = attention_partial_shape(std::max<uint64_t>(in.partial.shape(0), 1),
                                             in.q.shape(), row_dims(in).out);
  require(in.partial.shape() == shape, call.op, ": partial must have shape ", shape, ", got ",
          in.partial.shape());
  check_apart(call.op, "partial", in.partial,
              {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes, &in.v_cache.scales,
               &options.mask.alibi_slopes, &options.mask.tree_mask});
  if (in.q.shape(0) == 0) return;
  const abi::AttentionPlan plan =
      plan_call(recording, call, {.states = true, .splits = in.partial.shape(0)});
  dispatch_call(recording, call, plan,
                {.partial = in.partial, .out = {}, .lse = {}, .sink_logits = {}},
                scratch_of(encoder, plan, {}));
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("attention_partial");
}

void attention_merge(Encoder& encoder, const AttentionMergeInputs& in) try {
  Recording recording(encoder, "attention_merge");
  check_partial_tensor("attention_merge", in.partial);
  require(in.partial.shape(0) != 0, "attention_merge: partial has no splits");
  require(in.partial.shape(3) > 2 && in.partial.shape(3) - 2 <= abi::kKvMaxHeadDim,
          "attention_merge: partial must have v_head_dim + 2 entries a row, v_head_dim from 1 to ",
          abi::kKvMaxHeadDim, ", got ", in.partial.shape(3));
  check_outputs("attention_merge", in,
                {in.partial.shape(1), in.partial.shape(2), in.partial.shape(3) - 2});
  check_apart("attention_merge", "out", in.out, {&in.partial, &in.sink_logits});
  check_apart("attention_merge", "lse", in.lse, {&in.partial, &in.sink_logits});
  if (in.out.elements() == 0) return;
  dispatch_merge(recording, in);
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("attention_merge");
}

void attention(Encoder& encoder, const AttentionInputs& in, const AttentionOptions& options) try {
  Recording recording(encoder, "attention");
  const AttentionPartialInputs reads{in.q, in.k_cache, in.v_cache, {}, in.latent};
  const uint64_t out_dim = row_dims(reads).out;
  const AttentionMask& mask = options.mask;
  const AttentionCall call{"attention", reads, options};
  check_call(call);
  AttentionMergeInputs outputs{{}, in.out, in.lse, mask.sink_logits};
  check_outputs(call.op, outputs, {in.q.shape(0), in.q.shape(1), out_dim});
  check_scratch(call.op, in.scratch);
  for (const Tensor* written : {&in.out, &in.lse}) {
    check_apart(call.op, written == &in.out ? "out" : "lse", *written,
                {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes,
                 &in.v_cache.scales, &mask.sink_logits, &mask.alibi_slopes, &mask.tree_mask});
  }
  if (in.q.shape(0) == 0) return;
  const abi::AttentionPlan plan =
      plan_call(recording, call, {.out = in.out.dtype(), .keeps_scratch = in.scratch != nullptr});
  Tensor scratch = in.scratch != nullptr ? *in.scratch : Tensor();
  if (plan.reduce == abi::AttentionReduce::separate) {
    constexpr uint64_t kCounters = abi::kScratchCounterBytes / sizeof(float);
    const Dims shape = attention_partial_shape(plan.splits, in.q.shape(), out_dim);
    const uint64_t floats = shape[0] * shape[1] * shape[2] * shape[3];
    scratch = at_least(encoder.device(), scratch, kCounters + floats);
    outputs.partial = scratch.slice(0, kCounters, floats).reshape(shape);
    dispatch_call(recording, call, plan, outputs);
    dispatch_merge(recording, outputs);
  } else {
    scratch = scratch_of(encoder, plan, scratch);
    dispatch_call(recording, call, plan, outputs, scratch);
  }
  recording.commit();
  if (in.scratch != nullptr) *in.scratch = scratch;
} catch (const std::bad_alloc&) {
  out_of_memory("attention");
}

}  // namespace gyre
