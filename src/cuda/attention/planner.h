#pragma once
// Which kernel attends on a GPU, over how many splits of the keys, and who reduces them: by the
// problem and the GPU's limits alone.

#include "abi/attention_plan.h"
#include "cuda/kernels.h"

namespace gyre::cuda {

// Whether there is a kernel for an abi::AttentionDecodeSpec, for an abi::AttentionRowsSpec.
using HasKernel = bool (*)(uint64_t spec, const CudaLimits& limits);

abi::AttentionPlan plan_attention(const abi::AttentionProblem& problem, const CudaLimits& limits,
                                  HasKernel has_decode = fits_attention_decode,
                                  HasKernel has_many_rows = fits_attention_many_rows);

// As plan_attention, for latent attention; a plan without kernel where there is none.
abi::AttentionPlan plan_latent(const abi::AttentionProblem& problem, const CudaLimits& limits);

// What a block of attention_many_rows may use of this GPU, as AttentionRowsSpec has it; `few`: for
// up to 64 rows.
uint32_t many_rows_gpu(const CudaLimits& limits, bool few);

}  // namespace gyre::cuda
