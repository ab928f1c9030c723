#pragma once
// Which kernel attends on a GPU, over how many splits of the keys, and who reduces them: by the
// problem and the GPU's limits alone.

#include "abi/attention_plan.h"
#include "cuda/kernels.h"

namespace gyre::cuda {

// Whether there is a decode kernel for an abi::AttentionDecodeSpec.
using HasDecode = bool (*)(uint64_t spec, const CudaLimits& limits);

abi::AttentionPlan plan_attention(const abi::AttentionProblem& problem, const CudaLimits& limits,
                                  HasDecode has = fits_attention_decode);

}  // namespace gyre::cuda
