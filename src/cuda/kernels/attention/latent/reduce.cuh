#pragma once
// Latent attention, the last of three kernels: the states of a row's pieces to its output, rotated
// back. A block to a row; pieces are added in an order that only their number decides.
#include "cuda/kernels/attention/latent/prepare.cuh"

namespace gyre::cuda {

template <class T>
class LatentReducer {
  static constexpr uint32_t kColumns = 128, kGroups = kLatentThreads / kColumns,
                            kOfThread = T::kLatentDim / kColumns;

 public:
  LatentReducer(const abi::AttentionParams& p, const Args& args, const LatentScratch& scratch)
      : p_(p), args_(args), scratch_(scratch) {}

  void run(const LatentTile& tile, uint32_t r) {
    const uint64_t in_sequence = tile.first_row + r,
                   token = tile.first_token + in_sequence / p_.heads,
                   head = in_sequence % p_.heads;
    __shared__ float weights[kLatentMostPieces], sums[kGroups][T::kLatentDim];
    __shared__ float shared[kLatentThreads];
    const uint64_t row = token * p_.heads + head;
    SoftmaxState state = fold(row, tile.pieces, weights);
    if (tile.rows >> 31 != 0) state.sum = __uint_as_float(0x7FC00000u);
    add_pieces(row, tile.pieces, weights, sums);
    const uint32_t i = threadIdx.x;
    if (i < T::kLatentDim) {
      float x = 0;
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) x += sums[g][i];
      shared[T::coordinate(i)] = x;
    }
    __syncthreads();
    float x = i < T::kLatentDim ? shared[i] : 0.0f;
    if constexpr (T::kLevelsK) {
      x = transform_row(x, T::kLatentDim, shared);
      if (abi::kv_sign_bit(i) != 0) x = -x;
    }
    write(token, head, state, x);
    __syncthreads();
  }

 private:
  // In base 2; every thread has it. `weights`: of the pieces' values.
  SoftmaxState fold(uint64_t row, uint32_t pieces, float* weights) const {
    __shared__ SoftmaxState all;
    if (threadIdx.x < kWarp) {
      SoftmaxState state = SoftmaxState::none();
      for (uint32_t first = 0; first < pieces; first += kWarp) {
        const uint32_t piece = first + threadIdx.x;
        state.merge<kWarp>(piece < pieces ? piece_state(row, piece) : SoftmaxState::none());
      }
      const float to = SoftmaxState::reference(state.max);
      for (uint32_t piece = threadIdx.x; piece < pieces; piece += kWarp)
        weights[piece] = exp2_fast(piece_state(row, piece).max - to);
      if (threadIdx.x == 0) all = state;
    }
    __syncthreads();
    return all;
  }
  SoftmaxState piece_state(uint64_t row, uint32_t piece) const {
    const float* const at = latent_row_state(p_, args_, scratch_, row, piece) + T::kLatentDim;
    return at[1] == 0 ? SoftmaxState::none() : SoftmaxState{at[0], at[1]};
  }
  void add_pieces(uint64_t row, uint32_t pieces, const float* weights,
                  float (&sums)[kGroups][T::kLatentDim]) const {
    const uint32_t group = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
    float x[kOfThread] = {};
#pragma unroll 4
    for (uint32_t piece = group; piece < pieces; piece += kGroups) {
      const float* const from = latent_row_state(p_, args_, scratch_, row, piece) + column;
#pragma unroll
      for (uint32_t c = 0; c < kOfThread; ++c)
        x[c] = fma_weighted(from[c * kColumns], weights[piece], x[c]);
    }
#pragma unroll
    for (uint32_t c = 0; c < kOfThread; ++c) sums[group][c * kColumns + column] = x[c];
    __syncthreads();
  }

  void write(uint64_t token, uint64_t head, SoftmaxState state, float x) const {
    const uint32_t i = threadIdx.x;
    if (p_.partial == abi::kAttentionStates) {
      float* const to = pointer<float>(args_.at[arg_out]) +
                        (token * p_.heads + head) * (T::kLatentDim + 2);
      if (i < T::kLatentDim) to[i] = x;
      if (i == 0) {
        to[T::kLatentDim] = state.max == minus_infinity() ? state.max : state.max * kLn2;
        to[T::kLatentDim + 1] = state.sum;
      }
      return;
    }
    const float factor = finish_row(state, sink_logit(args_.at[arg_sink_logits], head));
    const uint64_t out =
        args_.at[arg_out] + token * p_.out_token_stride + head * p_.out_head_stride;
    if (i < T::kLatentDim) store_float(out, p_.out_dtype, i, x * factor);
    if (i == 0 && args_.at[arg_lse] != 0)
      *pointer<float>(args_.at[arg_lse] + token * p_.lse_token_stride +
                      head * p_.lse_head_stride) = log_sum_exp(state);
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  const LatentScratch& scratch_;
};

}  // namespace gyre::cuda
