// Merges partial states {sum of exp(logit - max) v, max, sum} of one row: a block per row. Threads
// run along the coordinates; where there are more threads than these, groups of threads take every
// groups-th split, and their sums are added in the groups' order. Bytes moved: the partial states
// once, and the output.
#include "abi/attention.h"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/merge_layout.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

// Partial states of one row, `stride` floats apart.
struct RowPartials {
  const float* first;
  uint64_t stride;
  uint32_t n;  // head_dim: {max, sum} follow the values

  // In base 2. A split without keys does not count, whatever it holds.
  SoftmaxState state(uint64_t split) const {
    const float* const at = first + split * stride + n;
    return at[1] == 0 ? SoftmaxState::none() : SoftmaxState{at[0] * kLog2E, at[1]};
  }
};

// All splits merged, by every thread.
inline SoftmaxState merge_states(const RowPartials& row, uint64_t splits) {
  __shared__ SoftmaxState of_warp[kMergeThreads / kWarp];
  SoftmaxState state = SoftmaxState::none();
  for (uint64_t begin = threadIdx.x / kWarp * kWarp; begin < splits; begin += kMergeThreads) {
    const uint64_t s = begin + threadIdx.x % kWarp;
    state.merge<kWarp>(s < splits ? row.state(s) : SoftmaxState::none());
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = state;
  __syncthreads();
  SoftmaxState all = SoftmaxState::none();
  all.merge<kMergeThreads / kWarp>(of_warp[threadIdx.x % (kMergeThreads / kWarp)]);
  return all;
}

template <class Out>
__global__ void __launch_bounds__(kMergeThreads, 2)
    attention_merge(const abi::AttentionMergeParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  __shared__ float weights[kMergeThreads];
  auto* const sums = reinterpret_cast<float*>(dynamic_shared());  // [groups][head_dim]
  const auto n = static_cast<uint32_t>(p.head_dim);
  const uint32_t columns = merge_columns(n), groups = merge_groups(n);
  const uint32_t group = groups == 1 ? 0 : threadIdx.x / columns;
  const uint64_t rows = p.tokens * p.heads;
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const RowPartials partials = {pointer<const float>(args.at[0]) + row * (n + 2), rows * (n + 2),
                                  n};
    SoftmaxState state = merge_states(partials, p.splits);
    const float reference = SoftmaxState::reference(state.max);
    for (uint64_t begin = 0; begin < p.splits; begin += kMergeThreads) {
      const auto count = static_cast<uint32_t>(abi::kv_least(p.splits - begin, kMergeThreads));
      __syncthreads();
      if (threadIdx.x < count)
        weights[threadIdx.x] = exp2_fast(partials.state(begin + threadIdx.x).max - reference);
      __syncthreads();
      const float* const from = partials.first + begin * partials.stride;
#pragma unroll 1  // usually one round: unrolled, some compilers run out of registers
      for (uint32_t c = threadIdx.x - group * columns; c < n && group < groups;
           c += groups == 1 ? kMergeThreads : columns) {
        float sum = begin == 0 ? 0.0f : sums[group * n + c];
#pragma unroll 8
        for (uint32_t s = group; s < count; s += groups)
          sum = fma_weighted(from[s * partials.stride + c], weights[s], sum);
        sums[group * n + c] = sum;
      }
    }
    __syncthreads();
    const uint64_t token = row / p.heads, head = row % p.heads;
    const float factor = finish_row(state, sink_logit(args.at[3], head));
    auto* const out =
        pointer<Out>(args.at[1] + token * p.out_token_stride + head * p.out_head_stride);
    for (uint32_t c = threadIdx.x; c < n; c += kMergeThreads) {
      float sum = 0;
      for (uint32_t g = 0; g < groups; ++g) sum += sums[g * n + c];
      out[c] = from_float<Out>(sum * factor);
    }
    if (threadIdx.x == 0 && args.at[2] != 0) {
      *pointer<float>(args.at[2] + token * p.lse_token_stride + head * p.lse_head_stride) =
          log_sum_exp(state);
    }
    __syncthreads();
  }
}

}  // namespace gyre::cuda
