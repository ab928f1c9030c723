#pragma once
// Weights of V as two planes of bytes, for files compiled with AVX-512. All of it anonymous, so
// that each has its own copy.

#include "cpu/attention/isa/weights_x86.h"

namespace gyre::cpu {
namespace {

// A block's weights in 16 bits, token by token: hi, then lo.
struct Weights {
  alignas(64) uint8_t bytes[kTileRows][2][kBlockKeys];
  float step[kTileRows];  // the fixed-point scale: what 256 stands for
};

// Four rows at once, so that none waits for its own: reduce(a, b) over the 16 lanes of v[i] is lane
// i of the result.
template <class Reduce>
inline __m128 reduce_rows(const __m512 (&v)[4], const Reduce& reduce) {
  const auto pairs = [&](__m512 a, __m512 b) {
    return reduce(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512d early = _mm512_castps_pd(pairs(v[0], v[1]));
  const __m512d late = _mm512_castps_pd(pairs(v[2], v[3]));
  const __m512 quads = reduce(_mm512_castpd_ps(_mm512_unpacklo_pd(early, late)),
                              _mm512_castpd_ps(_mm512_unpackhi_pd(early, late)));
  const __m512 halves = reduce(quads, _mm512_shuffle_f32x4(quads, quads, 0x4E));
  return _mm512_castps512_ps128(reduce(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1)));
}

// Whole weights of a row, 16 keys to a vector, as bytes.
inline void store_bytes(const __m512i (&whole)[4], uint8_t (&to)[2][kBlockKeys]) {
  const __m512i early = _mm512_packus_epi32(whole[0], whole[1]);
  const __m512i late = _mm512_packus_epi32(whole[2], whole[3]);
  const __m512i low = _mm512_set1_epi16(0xFF);
  const __m512i hi = _mm512_packus_epi16(_mm512_srli_epi16(early, 8), _mm512_srli_epi16(late, 8));
  const __m512i lo = _mm512_packus_epi16(_mm512_and_si512(early, low), _mm512_and_si512(late, low));
  const __m512i keys = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_store_si512(to[0], _mm512_permutexvar_epi32(keys, hi));
  _mm512_store_si512(to[1], _mm512_permutexvar_epi32(keys, lo));
}

// round_row_weights of weights_x86.h, for up to four rows.
inline void store_four_weights(const AccumulateJob& job, const BlockScales& scales, size_t row,
                               size_t rows, Weights& out) {
  constexpr float kHuge = 1e38f, kTiny = 0x1p-90f, kSteps = 65535;
  static_assert(kBlockKeys == 64);
  const size_t lanes = job.tiles * kTile;
  __m512 weighted[4][4], largest[4], sum[4];
  for (size_t r = 0; r < 4; ++r) {
    largest[r] = sum[r] = _mm512_setzero_ps();
    if (r >= rows) continue;
    const float* const p = job.p + (row + r) * kBlockKeys;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const size_t left = lanes > 16 * i ? lanes - 16 * i : 0;
      const auto there = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xFFFFu);
      const __m512 x = _mm512_maskz_loadu_ps(there, p + 16 * i);
      // The scale of a key that the row does not see may be NaN: leave it out.
      const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      weighted[r][i] = _mm512_maskz_mul_ps(seen, x, _mm512_load_ps(scales.at + 16 * i));
      largest[r] = _mm512_max_ps(largest[r], weighted[r][i]);
      sum[r] = _mm512_add_ps(sum[r], weighted[r][i]);
    }
  }
  __m128 max_weight = reduce_rows(largest, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const __m128 total = reduce_rows(sum, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  // A maximum may drop a NaN, a sum does not.
  const __mmask8 huge = _mm_cmp_ps_mask(total, _mm_set1_ps(kHuge), _CMP_NLT_UQ);
  max_weight = _mm_mask_mov_ps(max_weight, huge, total);
  // Or the inverse would overflow.
  const __mmask8 tiny = _mm_cmp_ps_mask(max_weight, _mm_set1_ps(kTiny), _CMP_LT_OQ);
  const __m128 lift = _mm_mask_mov_ps(_mm_set1_ps(1), tiny, _mm_set1_ps(0x1p60f));
  const __mmask8 some = _mm_cmp_ps_mask(max_weight, _mm_setzero_ps(), _CMP_GT_OQ);
  alignas(16) float lifts[4], inverses[4], steps[4];
  _mm_store_ps(lifts, lift);
  _mm_store_ps(inverses, _mm_maskz_div_ps(some, _mm_set1_ps(kSteps), _mm_mul_ps(max_weight, lift)));
  _mm_store_ps(steps, _mm_mul_ps(max_weight, _mm_set1_ps(256.0f / kSteps)));
  for (size_t r = 0; r < rows; ++r) {
    __m512i whole[4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const __m512 lifted = _mm512_mul_ps(weighted[r][i], _mm512_set1_ps(lifts[r]));
      whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(lifted, _mm512_set1_ps(inverses[r])));
    }
    store_bytes(whole, out.bytes[row + r]);
    out.step[row + r] = steps[r];
  }
}

inline void store_weights(const AccumulateJob& job, const BlockScales& scales, Weights& out) {
  size_t row = 0;
  for (; row + 4 <= job.rows; row += 4) store_four_weights(job, scales, row, 4, out);
  if (row < job.rows) store_four_weights(job, scales, row, job.rows - row, out);
}

// Scales of tile `tile` and the one after it, of `tiles` tiles; one that is not there has none.
inline __m512 two_tile_scales(const uint8_t* scales, size_t stride, size_t tile, size_t tiles,
                              size_t block) {
  const uint8_t* const at = scales + tile * stride + block * kTile * 2;
  const __m256 second = tile + 1 < tiles ? tile_scales(at + stride) : _mm256_setzero_ps();
  return _mm512_insertf32x8(_mm512_castps256_ps512(tile_scales(at)), second, 1);
}

}  // namespace
}  // namespace gyre::cpu
