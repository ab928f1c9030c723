#pragma once
// Latent attention, the last of three kernels: the states of a row's splits to its output, rotated
// back. Splits are added in an order that only their number decides.
#include "cuda/kernels/attention/latent/prepare.cuh"

namespace gyre::cuda {

template <class T>
class LatentReducer {
  static constexpr uint32_t kChunks = T::kLatentDim / 4 / kWarp;  // of four floats, of a lane

 public:
  // `together`: warps that share a row.
  LatentReducer(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch,
                uint32_t together)
      : p_(p), args_(args), scratch_(scratch), together_(together) {}

  // All threads of the block; rows of a tile are at most 64, others have none.
  void run(const LatentTile& tile, uint32_t r) {
    __shared__ float4 sums[kLatentWarps][T::kLatentDim / 4];
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const bool real = r < (tile.rows & 0xFFFFu);
    const uint64_t in_sequence = tile.first_row + r,
                   token = tile.first_token + divide(in_sequence, p_.heads),
                   head = in_sequence - divide(in_sequence, p_.heads) * p_.heads,
                   row = token * p_.heads + head;
    SoftmaxState state = SoftmaxState::none();
    float4 x[kChunks] = {};
    add_splits(row, real ? tile.splits : 0, state, x);
#pragma unroll
    for (uint32_t c = 0; c < kChunks; ++c) sums[warp][c * kWarp + lane] = x[c];
    __syncthreads();
    // Each of the row's warps adds some columns.
    auto* const of_row = reinterpret_cast<float*>(sums[warp / together_ * together_]);
    for (uint32_t c = warp % together_ * kWarp + lane; c < T::kLatentDim; c += together_ * kWarp) {
      float sum = of_row[c];
      for (uint32_t w = 1; w < together_; ++w) sum += of_row[w * T::kLatentDim + c];
      of_row[c] = sum;
    }
    __syncthreads();
    if (real && warp % together_ == 0) {
      if (tile.rows >> 31 != 0) state.sum = __uint_as_float(0x7FC00000u);
      finish(token, head, state,
             p_.partial == abi::kAttentionStates ? largest(row, tile.splits) : 0, of_row);
    }
    __syncthreads();
  }

 private:
  const float* place(uint64_t row, uint32_t split) const {
    return latent_row_state(p_, args_, scratch_, row, split);
  }
  SoftmaxState split_state(uint64_t row, uint32_t split) const {
    const auto at = *reinterpret_cast<const float2*>(place(row, split) + T::kLatentDim);
    return at.y == 0 ? SoftmaxState::none() : SoftmaxState{at.x, at.y};
  }
  float largest(uint64_t row, uint32_t splits) const {
    float max_logit = minus_infinity();
    for (uint32_t split = threadIdx.x % kWarp; split < splits; split += kWarp)
      max_logit = fmaxf(max_logit, place(row, split)[T::kLatentDim + 2]);
    return warp_max(max_logit);
  }
  // The state of all splits, in base 2, by each warp of the row for itself; and the values of every
  // so many-th.
  void add_splits(uint64_t row, uint32_t splits, SoftmaxState& all, float4 (&x)[kChunks]) const {
    constexpr uint32_t kOfLane = kLatentMaxSplits / kWarp;
    const uint32_t lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp % together_;
    SoftmaxState of[kOfLane];
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i) {
      const uint32_t split = i * kWarp + lane;
      of[i] = split < splits ? split_state(row, split) : SoftmaxState::none();
    }
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i)
      if (i * kWarp < splits) all.merge<kWarp>(of[i]);
    const float to = SoftmaxState::reference(all.max);
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i) {
      const float weight = exp2_fast(of[i].max - to);  // of the lane's split
#pragma unroll 4
      for (uint32_t split = i * kWarp + first; split < splits && split < (i + 1) * kWarp;
           split += together_)
        add_split(place(row, split), __shfl_sync(kAll, weight, static_cast<int>(split % kWarp)), x);
    }
  }
  static void add_split(const float* from, float weight, float4 (&x)[kChunks]) {
#pragma unroll
    for (uint32_t c = 0; c < kChunks; ++c) {
      const float4 y = reinterpret_cast<const float4*>(from)[c * kWarp + threadIdx.x % kWarp];
      x[c].x = fma_weighted(y.x, weight, x[c].x);
      x[c].y = fma_weighted(y.y, weight, x[c].y);
      x[c].z = fma_weighted(y.z, weight, x[c].z);
      x[c].w = fma_weighted(y.w, weight, x[c].w);
    }
  }

  // `sums`: the row's columns.
  void finish(uint64_t token, uint64_t head, SoftmaxState state, float max_logit,
              float* sums) const {
    WarpRow<T::kLatentDim> row;
#pragma unroll
    for (uint32_t i = 0; i < row.kCount; ++i) row.x[i] = sums[row.place(i)];
    if constexpr (T::kLevelsK) {  // to coordinates
      __syncwarp();
#pragma unroll
      for (uint32_t i = 0; i < row.kCount; ++i) sums[T::coordinate(row.place(i))] = row.x[i];
      __syncwarp();
#pragma unroll
      for (uint32_t i = 0; i < row.kCount; ++i) row.x[i] = sums[row.place(i)];
    }
    if constexpr (T::kLevelsK) row.transform(), row.flip_signs();
    if (p_.partial == abi::kAttentionStates) {
      // Relative to the largest logit, as states are.
      const float rescale = exp2_fast(state.max - SoftmaxState::reference(max_logit));
      float* const to =
          pointer<float>(args_.at[arg_out]) + (token * p_.heads + head) * (T::kLatentDim + 2);
#pragma unroll
      for (uint32_t i = 0; i < row.kCount; ++i) to[row.place(i)] = row.x[i] * rescale;
      if (threadIdx.x % kWarp == 0) {
        to[T::kLatentDim] = max_logit == minus_infinity() ? max_logit : max_logit * kLn2;
        to[T::kLatentDim + 1] = state.sum * rescale;
      }
      return;
    }
    const float factor = finish_row(state, sink_logit(args_.at[arg_sink_logits], head));
    const uint64_t out =
        args_.at[arg_out] + token * p_.out_token_stride + head * p_.out_head_stride;
#pragma unroll
    for (uint32_t i = 0; i < row.kCount; ++i)
      store_float(out, p_.out_dtype, row.place(i), row.x[i] * factor);
    if (threadIdx.x % kWarp == 0 && args_.at[arg_lse] != 0)
      *pointer<float>(args_.at[arg_lse] + token * p_.lse_token_stride + head * p_.lse_head_stride) =
          log_sum_exp(state);
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  const LatentScratch& scratch_;
  const uint32_t together_;
};

}  // namespace gyre::cuda
