#pragma once
// The error of each coordinate goes into those after it: one row at one gain, by a warp. A lane has
// kOwn consecutive coordinates. Step by step the owner of the next four codes them, from what it
// has, and all lanes get their errors by shuffle: lanes before the owner, which are done, take part
// for nothing.
#include "cuda/kernels/coded_levels.cuh"

namespace gyre::cuda {

// Rows of the factor, a lane's part of each.
template <uint32_t kOwn>
struct FactorRows {
  static constexpr uint32_t kRows = kOwn < 4 ? kOwn : 4;
  float of[kRows][kOwn];

  // from: the lane's part of the first row
  __device__ void load(const float* from, uint32_t n, bool is_wide) {
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      if constexpr (kOwn >= 4) {
        if (is_wide) {
#pragma unroll
          for (uint32_t k = 0; k < kOwn; k += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + r * n + k);
            of[r][k] = four.x, of[r][k + 1] = four.y, of[r][k + 2] = four.z, of[r][k + 3] = four.w;
          }
          continue;
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < kOwn; ++k) of[r][k] = from[r * n + k];
    }
  }
};

// t of the lane's coordinates. z: in shared memory. f: factor times gain.
template <uint32_t kFormat, uint32_t kOwn>
__device__ void feed_back(const float* factor, const float* z, uint32_t n, float f,
                          float (&t)[kOwn]) {
  using Rows = FactorRows<kOwn>;
  const uint32_t lane = threadIdx.x & 31, column = lane * kOwn;
  const bool is_wide = is_aligned(factor, 16);
  float v[kOwn], a[kOwn];
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) {
    v[k] = column < n ? z[column + k] * f : 0.0f;
    a[k] = 0.0f;
    t[k] = v[k] + a[k];
  }
  if (factor == nullptr) return;
  Rows next = {};
  const float* from = factor + column;
  if (column < n) next.load(from, n, is_wide);
#pragma unroll 1
  for (uint32_t owner = 0; owner * kOwn < n; ++owner) {
#pragma unroll
    for (uint32_t first = 0; first < kOwn; first += Rows::kRows) {
      const Rows rows = next;
      from += Rows::kRows * n;
      // Only what later coordinates need, and no row behind the last.
      if (owner * kOwn + first + Rows::kRows < n && column < n && lane >= owner)
        next.load(from, n, is_wide);
      float own[Rows::kRows], error[Rows::kRows];
#pragma unroll
      for (uint32_t k = 0; k < Rows::kRows; ++k) own[k] = a[first + k];
#pragma unroll
      for (uint32_t k = 0; k < Rows::kRows; ++k) {
        const float target = v[first + k] + own[k];
        const float left = v[first + k] - level_of<kFormat>(target);
#pragma unroll
        for (uint32_t later = k + 1; later < Rows::kRows; ++later)
          own[later] = __fmaf_rn(rows.of[k][first + later], left, own[later]);
        if (lane == owner) t[first + k] = target;
        error[k] = __shfl_sync(kAllLanes, left, static_cast<int>(owner));
      }
#pragma unroll
      for (uint32_t k = 0; k < Rows::kRows; ++k) {
#pragma unroll
        for (uint32_t j = 0; j < kOwn; ++j) a[j] = __fmaf_rn(rows.of[k][j], error[k], a[j]);
      }
    }
  }
}

}  // namespace gyre::cuda
