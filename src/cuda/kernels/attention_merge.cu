// Partial states {sum of exp(logit - max) v, max, sum} of one row, put together: a block to a row.
// Threads run along the coordinates; where there are more threads than these, groups of threads
// take every groups-th split, and their sums are added in the groups' order. Bytes moved: the
// partial states once, and the output.
#include "abi/attention.h"
#include "args.cuh"
#include "softmax.cuh"

namespace gyre::cuda {

constexpr uint32_t kMergeThreads = 512;

// Largest of all splits, in base 2, by every thread.
inline float merged_max(const float* first, uint64_t stride, uint64_t splits, uint32_t n) {
  __shared__ float of_warp[kMergeThreads / kWarp];
  float max = minus_infinity();
  for (uint64_t s = threadIdx.x; s < splits; s += kMergeThreads)
    max = fmaxf(max, first[s * stride + n] * kLog2E);
  max = warp_max(max);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = max;
  __syncthreads();
  for (uint32_t i = 0; i < kMergeThreads / kWarp; ++i) max = fmaxf(max, of_warp[i]);
  return max;
}

// Weights of up to 512 splits to shared memory, 0 for one without keys; returns the block's share
// of the denominator, the same in every thread.
inline float merge_weights(const float* first, uint64_t stride, uint64_t count, uint32_t n,
                           float max, float* weights) {
  __shared__ float sums[kMergeThreads / kWarp];
  const uint32_t s = threadIdx.x;
  float weight = 0, sum = 0;
  if (s < count) {
    const float part = first[s * stride + n + 1];
    // Where only NaN was seen the sum is NaN, and there is no largest.
    weight = part == 0                 ? 0.0f
             : max == minus_infinity() ? part
                                       : exp2_one(first[s * stride + n] * kLog2E - max);
    sum = part == 0 ? 0.0f : weight * part;
  }
  weights[s] = weight;
  sum = warp_sum(sum);
  if (s % kWarp == 0) sums[s / kWarp] = sum;
  __syncthreads();
  float total = 0;
  for (uint32_t i = 0; i < kMergeThreads / kWarp; ++i) total += sums[i];
  return total;
}

template <class Out>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge(const abi::AttentionMergeParams p, const Args args) {
  await_turn();
  pass_turn();
  __shared__ float weights[kMergeThreads];
  auto* const sums = reinterpret_cast<float*>(dynamic_shared());  // [groups][head_dim]
  const auto n = static_cast<uint32_t>(p.head_dim);
  const uint32_t wide = (n + kWarp - 1) / kWarp * kWarp;
  const uint32_t groups = wide < kMergeThreads ? kMergeThreads / wide : 1;
  const uint32_t group = groups == 1 ? 0 : threadIdx.x / wide;
  const uint64_t rows = p.tokens * p.heads;
  for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const uint64_t stride = rows * (n + 2);
    const float* const first = pointer<const float>(args.at[0]) + row * (n + 2);
    RowState state = {merged_max(first, stride, p.splits, n), 0};
    for (uint64_t begin = 0; begin < p.splits; begin += kMergeThreads) {
      const auto count = static_cast<uint32_t>(abi::kv_least(p.splits - begin, kMergeThreads));
      const float* const from = first + begin * stride;
      __syncthreads();
      state.sum += merge_weights(from, stride, count, n, state.max, weights);
      __syncthreads();
#pragma unroll 1  // usually one round: unrolled, some compilers run out of registers
      for (uint32_t c = threadIdx.x - group * wide; c < n && group < groups;
           c += groups == 1 ? kMergeThreads : wide) {
        float sum = begin == 0 ? 0.0f : sums[group * n + c];
#pragma unroll 8
        for (uint32_t s = group; s < count; s += groups) {
          const float x = from[s * stride + c], weight = weights[s];
          sum += weight == 0 ? 0.0f : weight * x;  // whatever a split without keys holds
        }
        sums[group * n + c] = sum;
      }
    }
    __syncthreads();
    const uint64_t token = row / p.heads, head = row % p.heads;
    const float factor = finish_row(state, pointer<const float>(args.at[3]), head);
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
