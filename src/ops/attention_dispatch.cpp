#include "ops/attention_dispatch.h"

#include <algorithm>

#include "ops/attention_latent.h"
#include "ops/attention_spec.h"
#include "ops/kv_layout.h"

namespace gyre {
namespace {

uint64_t first_key(const AttentionCall& call) {
  return abi::attention_first_key(call.in.q.shape(0), call.options.length,
                                  call.options.mask.window);
}

abi::AttentionProblem make_problem(const AttentionCall& call, const AttentionWanted& wanted) {
  const KvBuffer &k = call.in.k_cache, &v = call.in.v_cache;
  abi::AttentionProblem p{};
  p.tokens = call.in.q.shape(0);
  p.heads = call.in.q.shape(1);
  p.kv_heads = k.shape.kv_heads;
  p.capacity = k.shape.capacity;
  // A cache's keys are counted on the device: it may be full.
  p.keys = call.state != nullptr ? p.capacity : call.options.length - first_key(call);
  if (p.capacity != 0) p.key_bytes = (k.bytes() + v.bytes()) / p.kv_heads / p.capacity;
  p.addresses = k.codes.address() | k.scales.address() | v.codes.address() | v.scales.address();
  p.splits = wanted.splits;
  p.k = kv_cache_layout(k);
  p.v = kv_cache_layout(v);
  p.q_dtype = static_cast<uint32_t>(call.in.q.dtype());
  p.out_dtype = static_cast<uint32_t>(wanted.out);
  p.states = wanted.states ? 1 : 0;
  p.tree_mask = call.options.mask.tree_mask.defined() ? 1 : 0;
  p.latent = call.in.latent ? 1 : 0;
  p.keeps_scratch = wanted.keeps_scratch ? 1 : 0;
  return p;
}

void count_splits(abi::AttentionParams& p) {
  const uint64_t keys = p.end_key - p.first_key;
  p.split_keys = abi::attention_split_keys(keys, p.splits);
  p.used_splits = keys == 0 ? 1 : static_cast<uint32_t>((keys + p.split_keys - 1) / p.split_keys);
}

// Where the keys are: known now, or found on the device when the command runs.
void fill_keys(const AttentionCall& call, abi::AttentionParams& p) {
  if (call.state != nullptr) {
    p.places = call.state->places;
    p.segment = call.state->segment;
    const uint64_t before = p.segment == abi::kSegmentBody ? p.places.sink_tokens % p.capacity : 0;
    p.ring_start = (p.capacity - before) % p.capacity;
    return;
  }
  p.length = p.end_key = call.options.length;
  p.ring_start = call.options.ring_start;
  p.first_key = first_key(call);
  count_splits(p);
}

void fill_call(const AttentionCall& call, abi::AttentionParams& p) {
  const AttentionPartialInputs& in = call.in;
  const AttentionMask& mask = call.options.mask;
  p.tokens = in.q.shape(0);
  p.heads = in.q.shape(1);
  p.kv_heads = in.k_cache.shape.kv_heads;
  p.group = static_cast<uint32_t>(p.heads / p.kv_heads);
  p.capacity = in.k_cache.shape.capacity;
  p.window = mask.window;
  p.q_token_stride = in.q.stride(0) * size_bytes(in.q.dtype());
  p.q_head_stride = in.q.stride(1) * size_bytes(in.q.dtype());
  p.q_dtype = static_cast<uint32_t>(in.q.dtype());
  p.tree_stride = mask.tree_mask.defined() ? mask.tree_mask.stride(0) : 0;
  p.k = kv_cache_layout(in.k_cache);
  p.v = kv_cache_layout(in.v_cache);
  p.scale = checked_scale(call.op, call.options.scale, in.q.shape(2));
  p.soft_cap = mask.soft_cap;
  p.causal = mask.causal && !mask.tree_mask.defined() ? 1 : 0;
  p.latent = in.latent ? 1 : 0;
}

// The commands of a call whose keys are known.
void record_call(Recording& recording, const AttentionCall& call, const abi::AttentionPlan& plan,
                 abi::AttentionParams p, const AttentionMergeInputs& outputs,
                 const Tensor& scratch) {
  const AttentionPartialInputs& in = call.in;
  const bool states = outputs.partial.defined(),
             reduces = plan.reduce == abi::AttentionReduce::in_kernel;
  p.unpacked_room = plan.unpacked_room;
  if (states) {
    p.partial = reduces ? abi::kAttentionStates : abi::kAttentionPartial;
  } else {
    p.partial = plan.scratch_floats != 0 ? abi::kAttentionMerged : abi::kAttentionWhole;
    p.out_dtype = static_cast<uint32_t>(outputs.out.dtype());
    fill_outputs(outputs, p);
  }
  const Tensor none;
  const Tensor& out = states ? (reduces ? outputs.partial : none) : outputs.out;
  const bool needs_scratch = reduces && plan.scratch_floats != 0;
  const Tensor& partial = states && !reduces ? outputs.partial : needs_scratch ? scratch : none;
  const auto record = [&](const auto& kernel, const auto& spec) {
    recording.dispatch(
        kernel, spec, p,
        {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes, &in.v_cache.scales, &out,
         states ? &none : &outputs.lse, states ? &none : &outputs.sink_logits,
         &call.options.mask.alibi_slopes, &call.options.mask.tree_mask, &partial,
         call.state != nullptr ? &call.state->state : &none, &none, &none, &none, &none});
  };
  record_planned(plan, record);
}

// attention_latent reduces what it splits to one state of a row: each split that the caller wants
// is a call over its keys.
void dispatch_latent_states(Recording& recording, const AttentionCall& call,
                            const abi::AttentionPlan& plan, abi::AttentionParams p,
                            const Tensor& partial, const Tensor& scratch) {
  const uint64_t splits = partial.shape(0), first = p.first_key, end = p.end_key;
  const uint64_t each = abi::attention_split_keys(end - first, splits);
  for (uint64_t i = 0; i < splits; ++i) {
    if (splits > 1) {
      p.first_key = std::min(first + i * each, end);
      p.end_key = std::min(p.first_key + each, end);
      count_splits(p);
    }
    record_call(recording, call, plan, p,
                {.partial = partial.slice(0, i, 1), .out = {}, .lse = {}, .sink_logits = {}},
                scratch);
  }
}

}  // namespace

abi::AttentionPlan plan_call(const Recording& recording, const AttentionCall& call,
                             const AttentionWanted& wanted) {
  const abi::AttentionProblem problem = make_problem(call, wanted);
  abi::AttentionPlan plan = abi::attention_default_plan(problem);
  recording.plan(kAttention, problem, plan);
  if (problem.latent != 0) require_latent_kernel(recording, call.op, problem, plan);
  return plan;
}

void dispatch_call(Recording& recording, const AttentionCall& call, const abi::AttentionPlan& plan,
                   const AttentionMergeInputs& outputs, const Tensor& scratch) {
  abi::AttentionParams p{};
  p.phase = abi::AttentionPhase::all;  // 0 takes no rows
  fill_call(call, p);
  p.splits = plan.splits;
  p.fewest_split_keys = plan.fewest_split_keys;
  fill_keys(call, p);
  const bool states = outputs.partial.defined();
  if (states && plan.kernel == abi::AttentionKernel::attention_latent)
    return dispatch_latent_states(recording, call, plan, p, outputs.partial, scratch);
  record_call(recording, call, plan, p, outputs, scratch);
}

Tensor at_least(const Device& device, const Tensor& scratch, uint64_t floats) {
  if (scratch.defined() && scratch.elements() >= floats) return scratch;
  return device.tensor(DType::f32, {floats});
}

void dispatch_merge(Recording& recording, const AttentionMergeInputs& in) {
  abi::AttentionMergeParams p{};
  p.splits = in.partial.shape(0);
  p.tokens = in.partial.shape(1);
  p.heads = in.partial.shape(2);
  p.head_dim = in.out.shape(2);
  fill_outputs(in, p);
  recording.dispatch(kAttentionMerge, make_merge_spec(in.out.dtype()), p,
                     {&in.partial, &in.out, &in.lse, &in.sink_logits});
}

}  // namespace gyre
