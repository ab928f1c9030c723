#pragma once
// Attention of many rows: multipliers of a stage's keys, in scores and in weights.
#include "cuda/kernels/attention/common/softmax.cuh"
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

// The largest multiplier of V that each of a thread's rows sees; `hidden`: some rows do not see
// some keys, whose scores are -inf then.
template <class T>
inline void find_max_multiplier(const unsigned char* keys, bool hidden,
                                const float (&s)[T::kKeyTiles][4], float (&max)[2]) {
  if (!hidden) {
    const float4 maxima = *reinterpret_cast<const float4*>(keys + T::kLayout.maxima);
    max[0] = max[1] = fmaxf(fmaxf(maxima.x, maxima.y), fmaxf(maxima.z, maxima.w));
    return;
  }
  max[0] = max[1] = 0;
  const auto* const scales =
      reinterpret_cast<const float2*>(keys + T::kLayout.v_scales) + threadIdx.x % 4;
#pragma unroll
  for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
    const float2 scale = scales[t * 4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float of = i % 2 == 0 ? scale.x : scale.y;
      if (s[t][i] != minus_infinity() && is_finite(of)) max[i / 2] = fmaxf(max[i / 2], of);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) max[i] = warp_max<4>(max[i]);
}

// A weight of 0 stays 0, whatever the multiplier: which of a stage's keys a row does not see
// depends on its chunk, and a multiplier may be NaN.
template <class T>
inline void scale_weights(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) {
  const auto* const scales =
      reinterpret_cast<const float2*>(keys + T::kLayout.v_scales) + threadIdx.x % 4;
#pragma unroll
  for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
    const float2 scale = scales[t * 4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      s[t][i] = s[t][i] == 0 ? 0.0f : s[t][i] * (i % 2 == 0 ? scale.x : scale.y);
  }
}

}  // namespace gyre::cuda
