#pragma once
// The error of each coordinate goes into those after it: one row at one gain, by a warp. A lane has
// kOwn consecutive coordinates. Step by step the owner of the next four codes them, from what it
// has, and all lanes get their errors by shuffle: lanes before the owner, which are done, take part
// for nothing. The chain of coordinates is the time this takes: rows of the factor are loaded two
// steps ahead, and no branch is in its way.
#include "cuda/kernels/calibrated_levels.cuh"
#include "cuda/kernels/matrix.cuh"

namespace gyre::cuda {

// Rows of the factor, a lane's part of each.
template <uint32_t kOwn>
struct FactorRows {
  static constexpr uint32_t kRows = kOwn < 4 ? kOwn : 4;
  float of[kRows][kOwn];

  // from: the lane's part of the first row
  template <bool kWide>
  __device__ void load(const float* from, uint32_t n) {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) load_entries<kWide>(from + r * n, of[r]);
  }
};

// A scale block of a row, z and carried in shared memory.
struct ScaleBlock {
  uint32_t n;           // coordinates
  uint32_t row_n;       // of the row: from row to row of the factor
  const float* factor;  // where the block's rows and columns meet; null: none
  const float* z;
  const float* carried;  // what errors of the blocks before add; null: nothing
};

// What a lane knows of its row at a gain.
template <uint32_t kOwn>
struct Chain {
  float v[kOwn], a[kOwn], t[kOwn];
};

// Coordinates [first, first + kRows) of the lane `owner`.
template <uint32_t kFormat, uint32_t kOwn>
__device__ void code_step(const FactorRows<kOwn>& rows, uint32_t owner, uint32_t first,
                          Chain<kOwn>& chain) {
  constexpr uint32_t kRows = FactorRows<kOwn>::kRows;
  const bool is_owner = (threadIdx.x & 31) == owner;
  float own[kRows], error[kRows];
#pragma unroll
  for (uint32_t k = 0; k < kRows; ++k) own[k] = chain.a[first + k];
#pragma unroll
  for (uint32_t k = 0; k < kRows; ++k) {
    const float target = chain.v[first + k] + own[k];
    const float left = chain.v[first + k] - level_of<kFormat>(target);
#pragma unroll
    for (uint32_t later = k + 1; later < kRows; ++later)
      own[later] = __fmaf_rn(rows.of[k][first + later], left, own[later]);
    chain.t[first + k] = is_owner ? target : chain.t[first + k];
    error[k] = __shfl_sync(kAllLanes, left, static_cast<int>(owner));
  }
#pragma unroll
  for (uint32_t k = 0; k < kRows; ++k) {
#pragma unroll
    for (uint32_t j = 0; j < kOwn; ++j) chain.a[j] = __fmaf_rn(rows.of[k][j], error[k], chain.a[j]);
  }
}

template <bool kWide, uint32_t kFormat, uint32_t kOwn>
__device__ void run_chain(const ScaleBlock& block, Chain<kOwn>& chain) {
  using Rows = FactorRows<kOwn>;
  constexpr uint32_t kRows = Rows::kRows, kAhead = 2;  // steps
  static_assert(kOwn == kRows || kOwn == kAhead * kRows);
  const uint32_t lane = threadIdx.x & 31, n = block.n, stride = block.row_n;
  // Lanes without coordinates load what others do.
  const float* const from = block.factor + (lane * kOwn < n ? lane * kOwn : 0);
  Rows rows[kAhead];
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    rows[i].template load<kWide>(from + i * kRows * stride, stride);
#pragma unroll 1
  for (uint32_t step = 0; step * kRows < n; step += kAhead) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      code_step<kFormat>(rows[i], (step + i) * kRows / kOwn, i * kRows % kOwn, chain);
      const uint32_t next = (step + i + kAhead) * kRows;
      rows[i].template load<kWide>(from + (next < n ? next : 0) * stride, stride);
    }
  }
}

// t of the lane's coordinates. f: factor times gain.
template <uint32_t kFormat, uint32_t kOwn>
__device__ void error_feedback(const ScaleBlock& block, float f, float (&t)[kOwn]) {
  const uint32_t column = (threadIdx.x & 31) * kOwn;
  Chain<kOwn> chain;
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) {
    chain.v[k] = column < block.n ? block.z[column + k] * f : 0.0f;
    chain.a[k] =
        block.carried != nullptr && column < block.n ? block.carried[column + k] * f : 0.0f;
    chain.t[k] = chain.v[k] + chain.a[k];
  }
  if (block.factor != nullptr) {
    if (kOwn % 4 == 0 && is_aligned(block.factor, 16)) {
      run_chain<kOwn % 4 == 0, kFormat>(block, chain);
    } else {
      run_chain<false, kFormat>(block, chain);
    }
  }
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) t[k] = chain.t[k];
}

}  // namespace gyre::cuda
