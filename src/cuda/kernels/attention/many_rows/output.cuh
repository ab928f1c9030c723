#pragma once
// Attention of many rows: a thread's sums of two rows, out of the rotated domain, to global memory.
// Column 8 t + 2 j + e is in place e of tile t of the lane's.
#include "cuda/kernels/attention/common/query_values.cuh"
#include "cuda/kernels/attention/common/row_output.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

// Signs of the columns 8 t + 2 j + e, a bit for each lane j.
constexpr uint32_t column_signs(uint32_t tile, uint32_t e) {
  uint32_t bits = 0;
  for (uint32_t j = 0; j < 4; ++j) bits |= abi::kv_sign_bit(8 * tile + 2 * j + e) << j;
  return bits;
}
template <uint32_t kDim, uint32_t kTile = 0, uint32_t kOfTile>
inline void flip_columns(float (&o)[kDim / 8][kOfTile], float factor) {
  const uint32_t j = threadIdx.x % 4;
  constexpr uint32_t kEven = column_signs(kTile, 0), kOdd = column_signs(kTile, 1);
  const float even = (kEven >> j & 1) != 0 ? -factor : factor,
              odd = (kOdd >> j & 1) != 0 ? -factor : factor;
#pragma unroll
  for (uint32_t i = 0; i < kOfTile; ++i) o[kTile][i] *= i % 2 == 0 ? even : odd;
  if constexpr (kTile + 1 < kDim / 8) flip_columns<kDim, kTile + 1>(o, factor);
}

// The transform's stages over a thread's columns, of one row or of two, and over the four lanes
// that share a row. `unit`: of the columns.
template <uint32_t kDim, uint32_t kOfTile>
inline void restore_columns(float (&o)[kDim / 8][kOfTile], float unit = 1.0f) {
  constexpr uint32_t kTiles = kDim / 8;
#pragma unroll
  for (uint32_t t = 0; t < kTiles; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < kOfTile; i += 2) {
      const float a = o[t][i], b = o[t][i + 1];
      o[t][i] = a + b, o[t][i + 1] = a - b;
    }
  }
#pragma unroll
  for (uint32_t h = 1; h < kTiles; h *= 2) {
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      if ((t & h) != 0) continue;
#pragma unroll
      for (uint32_t i = 0; i < kOfTile; ++i) {
        const float a = o[t][i], b = o[t + h][i];
        o[t][i] = a + b, o[t + h][i] = a - b;
      }
    }
  }
#pragma unroll
  for (uint32_t h = 1; h < 4; h *= 2) {
    const float sign = (threadIdx.x & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < kTiles * kOfTile; ++i) {
      float& x = o[i / kOfTile][i % kOfTile];
      x = fmaf(x, sign, __shfl_xor_sync(kAll, x, static_cast<int>(h)));
    }
  }
  flip_columns<kDim>(o, inverse_root(kDim) * unit);
}

// The state of older keys, folded with that of row i, 0 or 1, of the thread's.
template <class T>
inline void fold_older(uint64_t from, uint32_t i, SoftmaxState& state, float (&o)[T::kVTiles][4]) {
  const float2 of = load_l2<float2>(from + T::kVDim * 4);
  SoftmaxState older = {of.x, of.y};
  const SoftmaxState::Factors f = older.fold(state);
  state = older;
#pragma unroll
  for (uint32_t t = 0; t < T::kVTiles; ++t) {
    const float2 x = load_l2<float2>(from + (t * 8 + threadIdx.x % 4 * 2) * 4);
    o[t][2 * i] = f.fold(x.x, o[t][2 * i]);
    o[t][2 * i + 1] = f.fold(x.y, o[t][2 * i + 1]);
  }
}

}  // namespace gyre::cuda
