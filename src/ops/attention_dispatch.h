#pragma once
// From a call that was checked to commands: problem, plan, dispatch.

#include "abi/attention_plan.h"
#include "ops/attention_check.h"
#include "runtime/recorder.h"

namespace gyre {

// Who wants what of the plan: the output, or partial states.
struct AttentionWanted {
  DType out = DType::f32;
  bool states = false;
  uint64_t splits = 0;  // with states; 0: the device chooses
};

abi::AttentionPlan plan_call(const Recording& recording, const AttentionCall& call,
                             const AttentionWanted& wanted);

// With `outputs.partial` where the plan needs scratch memory or states are wanted; the other
// outputs are written if they are not.
void dispatch_call(Recording& recording, const AttentionCall& call, const abi::AttentionPlan& plan,
                   const AttentionMergeInputs& outputs);

void dispatch_merge(Recording& recording, const AttentionMergeInputs& in);

}  // namespace gyre
