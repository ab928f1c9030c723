#pragma once
// From a call that was checked to commands: problem, plan, dispatch.

#include "abi/attention_plan.h"
#include "abi/kernels.h"
#include "ops/attention_check.h"
#include "runtime/recorder.h"

namespace gyre {

// Who wants what of the plan: the output, or partial states.
struct AttentionWanted {
  DType out = DType::f32;
  bool states = false;
  uint64_t splits = 0;         // with states; 0: the device chooses
  bool keeps_scratch = false;  // the call's scratch memory serves later calls, too
};

abi::AttentionPlan plan_call(const Recording& recording, const AttentionCall& call,
                             const AttentionWanted& wanted);

// How many states of each row a plan leaves, where they are wanted or merged by attention_merge.
inline uint64_t states_of(const abi::AttentionPlan& plan) {
  return plan.reduce == abi::AttentionReduce::in_kernel ? 1 : plan.splits;
}

// States go to `outputs.partial`, [states_of(plan), ...]; without, `outputs.out` and lse are
// written. `scratch` is for plans that reduce in the kernel.
void dispatch_call(Recording& recording, const AttentionCall& call, const abi::AttentionPlan& plan,
                   const AttentionMergeInputs& outputs, const Tensor& scratch = {});

// Calls `record` with the kernel that a plan names, and its spec; once for each command where a
// kernel takes several.
template <class Record>
void record_planned(const abi::AttentionPlan& plan, const Record& record) {
  switch (plan.kernel) {
    case abi::AttentionKernel::attention_decode:
      return record(kAttentionDecode, spec_from_key<abi::AttentionDecodeSpec>(plan.spec));
    case abi::AttentionKernel::attention_many_rows:
      for (const uint64_t spec : {plan.ahead, plan.spec, plan.behind})
        if (spec != 0) record(kAttentionManyRows, spec_from_key<abi::AttentionRowsSpec>(spec));
      return;
    case abi::AttentionKernel::attention_latent: {
      auto spec = spec_from_key<abi::AttentionLatentSpec>(plan.spec);
      for (uint8_t part = 0; part < abi::kLatentParts; ++part) {
        spec.part = part;
        record(kAttentionLatent, spec);
      }
      return;
    }
    case abi::AttentionKernel::attention:
      return record(kAttention, spec_from_key<abi::AttentionSpec>(plan.spec));
  }
}

// Strides of out and lse, in the params of either kernel that writes them.
template <class Params>
void fill_outputs(const AttentionMergeInputs& outputs, Params& p) {
  p.out_token_stride = outputs.out.stride(0) * size_bytes(outputs.out.dtype());
  p.out_head_stride = outputs.out.stride(1) * size_bytes(outputs.out.dtype());
  if (!outputs.lse.defined()) return;
  p.lse_token_stride = outputs.lse.stride(0) * sizeof(float);
  p.lse_head_stride = outputs.lse.stride(1) * sizeof(float);
}

// Scratch memory that grows.
Tensor at_least(const Device& device, const Tensor& scratch, uint64_t floats);

void dispatch_merge(Recording& recording, const AttentionMergeInputs& in);

}  // namespace gyre
