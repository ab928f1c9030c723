#pragma once
// Scales of tiles, and weights of V in fixed point: probabilities times the scales of V, as
// integers. In AVX2 and FMA, for files compiled with these; all of it anonymous, so that each has
// its own copy.

#include <immintrin.h>

#include <cstddef>

#include "cpu/attention/isa/prefetch.h"

namespace gyre::cpu {
namespace {

inline __m256 tile_scales(const uint8_t* scales) {
  const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 15);
  return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p-31f));
}

// Scales of V of one scale block, key by key.
struct BlockScales {
  alignas(64) float at[kBlockKeys];
  BlockScales(const AccumulateJob& job, size_t block) {
    for (size_t tile = 0; tile < job.tiles; ++tile) {
      _mm256_store_ps(at + tile * kTile,
                      tile_scales(job.scales + tile * job.scales_stride + block * kTile * 2));
    }
  }
};

inline float largest_of(__m256 v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float sum_of(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// A row's weights as integers, relative to the largest, which is kMax: whole[tile]. Returns the
// fixed-point scale: what 256 stands for, as 1 may be too small for a float.
template <int32_t kMax>
inline float round_row_weights(const AccumulateJob& job, const BlockScales& scales, size_t row,
                               __m256i (&whole)[kBlockKeys / kTile]) {
  constexpr float kHuge = 1e38f, kTiny = 0x1p-90f, kSteps = kMax;
  const float* const p = job.p + row * kBlockKeys;
  __m256 weighted[kBlockKeys / kTile];
  __m256 largest = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const __m256 x = _mm256_loadu_ps(p + tile * kTile);
    // The scale of a key that the row does not see may be NaN: leave it out.
    const __m256 seen = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    const __m256 product = _mm256_mul_ps(x, _mm256_load_ps(scales.at + tile * kTile));
    weighted[tile] = _mm256_and_ps(seen, product);
    largest = _mm256_max_ps(largest, weighted[tile]);
    sum = _mm256_add_ps(sum, weighted[tile]);
  }
  float max_weight = largest_of(largest);
  const float total = sum_of(sum);
  if (!(total < kHuge)) max_weight = total;  // a maximum may drop a NaN, a sum does not
  const float lift = max_weight < kTiny ? 0x1p60f : 1.0f;  // or the inverse would overflow
  const float inverse = max_weight > 0 ? kSteps / (max_weight * lift) : 0.0f;
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const __m256 lifted = _mm256_mul_ps(weighted[tile], _mm256_set1_ps(lift));
    whole[tile] = _mm256_cvtps_epi32(_mm256_mul_ps(lifted, _mm256_set1_ps(inverse)));
  }
  return max_weight * (256.0f / kSteps);
}

}  // namespace
}  // namespace gyre::cpu
