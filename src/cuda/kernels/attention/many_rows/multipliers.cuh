#pragma once
// Attention of many rows: multipliers of a stage's keys, in scores and in weights.
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

template <class T>
inline void scale_scores(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) {
  const auto* const scales =
      reinterpret_cast<const float2*>(keys + T::kLayout.scales) + threadIdx.x % 4;
#pragma unroll
  for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
    const float2 scale = scales[t * 4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) s[t][i] *= i % 2 == 0 ? scale.x : scale.y;
  }
}

// `kHidden`: some rows do not see some keys, whose multipliers may be NaN.
template <class T, bool kHidden>
inline void scale_weights(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) {
  const auto* const scales =
      reinterpret_cast<const float2*>(keys + T::kLayout.v_scales) + threadIdx.x % 4;
#pragma unroll
  for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
    const float2 scale = scales[t * 4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      s[t][i] = kHidden && s[t][i] == 0 ? 0.0f : s[t][i] * (i % 2 == 0 ? scale.x : scale.y);
  }
}

}  // namespace gyre::cuda
