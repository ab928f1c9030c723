#pragma once
// Latent attention, the last of three kernels: the states of a row's pieces to its output, rotated
// back. Pieces are added in an order that only their number decides.
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
    const uint32_t pieces = real ? tile.pieces : 0;
    SoftmaxState state = fold(row, pieces);
    float4 x[kChunks] = {};
    add_pieces(row, pieces, SoftmaxState::reference(state.max), x);
#pragma unroll
    for (uint32_t c = 0; c < kChunks; ++c) sums[warp][c * kWarp + lane] = x[c];
    __syncthreads();
    if (real && warp % together_ == 0) {
      if (tile.rows >> 31 != 0) state.sum = __uint_as_float(0x7FC00000u);
      finish(token, head, state, reinterpret_cast<float*>(sums[warp]));
    }
    __syncthreads();
  }

 private:
  const float* place(uint64_t row, uint32_t piece) const {
    return latent_row_state(p_, args_, scratch_, row, piece);
  }
  SoftmaxState piece_state(uint64_t row, uint32_t piece) const {
    const auto at = *reinterpret_cast<const float2*>(place(row, piece) + T::kLatentDim);
    return at.y == 0 ? SoftmaxState::none() : SoftmaxState{at.x, at.y};
  }
  // In base 2; every warp of the row for itself.
  SoftmaxState fold(uint64_t row, uint32_t pieces) const {
    constexpr uint32_t kOfLane = kLatentMostPieces / kWarp;
    SoftmaxState of[kOfLane], all = SoftmaxState::none();
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i) {
      const uint32_t piece = i * kWarp + threadIdx.x % kWarp;
      of[i] = piece < pieces ? piece_state(row, piece) : SoftmaxState::none();
    }
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i)
      if (i * kWarp < pieces) all.merge<kWarp>(of[i]);
    return all;
  }
  void add_pieces(uint64_t row, uint32_t pieces, float to, float4 (&x)[kChunks]) const {
    const uint32_t lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp % together_;
#pragma unroll 2
    for (uint32_t piece = first; piece < pieces; piece += together_) {
      const float* const from = place(row, piece);
      const SoftmaxState state = piece_state(row, piece);
      const float weight = exp2_fast(state.max - to);
      float4 y[kChunks];
#pragma unroll
      for (uint32_t c = 0; c < kChunks; ++c)
        y[c] = reinterpret_cast<const float4*>(from)[c * kWarp + lane];
#pragma unroll
      for (uint32_t c = 0; c < kChunks; ++c) {
        x[c].x = fma_weighted(y[c].x, weight, x[c].x);
        x[c].y = fma_weighted(y[c].y, weight, x[c].y);
        x[c].z = fma_weighted(y[c].z, weight, x[c].z);
        x[c].w = fma_weighted(y[c].w, weight, x[c].w);
      }
    }
  }

  // `sums`: columns, of each of the row's warps one behind the other.
  void finish(uint64_t token, uint64_t head, SoftmaxState state, float* sums) const {
    WarpRow<T::kLatentDim> row;
#pragma unroll
    for (uint32_t i = 0; i < row.kCount; ++i) {
      for (uint32_t w = 0; w < together_; ++w)
        row.x[i] += sums[w * T::kLatentDim + row.place(i)];
    }
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
      float* const to =
          pointer<float>(args_.at[arg_out]) + (token * p_.heads + head) * (T::kLatentDim + 2);
#pragma unroll
      for (uint32_t i = 0; i < row.kCount; ++i) to[row.place(i)] = row.x[i];
      if (threadIdx.x % kWarp == 0) {
        to[T::kLatentDim] = state.max == minus_infinity() ? state.max : state.max * kLn2;
        to[T::kLatentDim + 1] = state.sum;
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
      *pointer<float>(args_.at[arg_lse] + token * p_.lse_token_stride +
                      head * p_.lse_head_stride) = log_sum_exp(state);
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  const LatentScratch& scratch_;
  const uint32_t together_;
};

}  // namespace gyre::cuda
