// Attention over the segments of a KvCache: body, sink tokens, tail.
#include <algorithm>
#include <iterator>
#include <utility>

#include "ops/attention_latent.h"
#include "ops/attention_spec.h"
#include "ops/cache_ops.h"
#include "ops/kv_calibration.h"
#include "runtime/device_impl.h"
#include "runtime/recorder.h"

namespace gyre {
namespace {

constexpr const char* kAttendOp = "kv_cache.attend";

void check_attend(const AttentionCall& body, const AttentionInputs& in) {
  check_call(body);
  const AttentionMask& mask = body.options.mask;
  check_outputs(kAttendOp, {{}, in.out, in.lse, mask.sink_logits},
                {in.q.shape(0), in.q.shape(1), row_dims(body.in).out});
  for (const Tensor* written : {&in.out, &in.lse}) {
    check_apart(kAttendOp, written == &in.out ? "out" : "lse", *written,
                {&in.q, &mask.sink_logits, &mask.alibi_slopes, &mask.tree_mask});
  }
}

// The states of every segment, one behind the other.
void dispatch_segments(Recording& recording, const AttentionInputs& in,
                       const AttentionOptions& options, const CacheSegments& segments,
                       const abi::AttentionPlan* plans, const Tensor& partial,
                       const Tensor& scratch) {
  uint64_t first = 0;
  for (uint32_t i = 0; i < segments.count; ++i) {
    const CacheSegment& segment = segments.of[i];
    const AttentionPartialInputs reads{in.q, segment.k, segment.v, {}, in.latent};
    const AttentionCall call{kAttendOp, reads, options, &segment.at};
    const Tensor states = partial.slice(0, first, states_of(plans[i]));
    dispatch_call(recording, call, plans[i],
                  {.partial = states, .out = {}, .lse = {}, .sink_logits = {}}, scratch);
    first += states_of(plans[i]);
  }
}

}  // namespace

std::string describe_attention(const Device& device, const KvShape& k, const KvShape& v,
                               bool latent) {
  if (latent) return describe_latent(device, k, v);
  return impl_of(device)->describe(kAttention.info,
                                   spec_key(make_spec(DType::f32, k.format, v.format, DType::f32)));
}

void attend_cache(Encoder& encoder, const AttentionInputs& given, const AttentionOptions& options,
                  const CacheSegments& segments, AttendScratch& scratch, const NewNote* note) {
  Recording recording(encoder, kAttendOp);
  const CacheSegment& body = segments.of[0];
  const TransformPair transforms{segments.calibration.k.transform, segments.calibration.v.transform,
                                 given.latent};
  const bool alone = segments.count == 1;
  AttentionInputs in = given;
  check_attend({kAttendOp, {in.q, body.k, body.v, {}, in.latent}, options, &body.at}, in);
  const AttentionMask& mask = options.mask;
  check_means(
      kAttendOp, transforms,
      {in.lse.defined(), mask.sink_logits.defined(), mask.soft_cap != 0, mask.tree_mask.defined()});
  if (in.q.shape(0) == 0) return;
  const TransformAttention inside =
      enter_transform(recording, encoder.device(), transforms, in.q, in.out, !alone);
  in.q = inside.q;
  in.out = inside.out;
  abi::AttentionPlan plans[std::size(segments.of)]{};
  uint64_t states = 0, in_kernel = 0;
  for (uint32_t i = 0; i < segments.count; ++i) {
    const CacheSegment& segment = segments.of[i];
    const AttentionPartialInputs reads{in.q, segment.k, segment.v, {}, in.latent};
    plans[i] = plan_call(recording, {kAttendOp, reads, options, &segment.at},
                         {.out = alone ? in.out.dtype() : DType::f32,
                          .states = !alone,
                          .splits = i == 0 ? 0u : 1u,
                          .keeps_scratch = true});
    states += states_of(plans[i]);
    if (plans[i].reduce == abi::AttentionReduce::in_kernel)
      in_kernel = std::max(in_kernel, plans[i].scratch_floats);
  }
  const bool merge = !alone || plans[0].reduce == abi::AttentionReduce::separate;
  AttendScratch reserved = scratch;
  AttentionMergeInputs outputs{{}, in.out, in.lse, mask.sink_logits};
  if (merge) {
    const Dims shape = attention_partial_shape(states, in.q.shape(), in.out.shape(2));
    const uint64_t floats = shape[0] * shape[1] * shape[2] * shape[3];
    reserved.states = at_least(encoder.device(), scratch.states, floats);
    outputs.partial = reserved.states.slice(0, 0, floats).reshape(shape);
  }
  Tensor& of_kernels = reserved.of_kernels(in.latent);
  if (in_kernel != 0) of_kernels = at_least(encoder.device(), of_kernels, in_kernel);
  if (alone) {
    const AttentionPartialInputs reads{in.q, body.k, body.v, {}, in.latent};
    dispatch_call(recording, {kAttendOp, reads, options, &body.at}, plans[0], outputs, of_kernels);
  } else {
    dispatch_segments(recording, in, options, segments, plans, outputs.partial, of_kernels);
  }
  if (merge) dispatch_merge(recording, outputs);
  leave_transform(recording, transforms, inside, given.out);
  if (note != nullptr) recording.note(*note);
  recording.commit();
  scratch = std::move(reserved);
}

}  // namespace gyre
