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

// weigh_row of weights_x86.h, 16 keys at a time: the same numbers.
inline void store_weights(const AccumulateJob& job, const BlockScales& scales, size_t row,
                          Weights& out) {
  constexpr float kHuge = 1e38f, kTiny = 0x1p-90f, kSteps = 65535;
  constexpr size_t kVectors = kBlockKeys / 16;
  const float* const p = job.p + row * kBlockKeys;
  const size_t lanes = job.tiles * kTile;
  __m512 weighted[kVectors];
  __m512 largest = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    const size_t left = lanes > 16 * i ? lanes - 16 * i : 0;
    const auto there = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xFFFFu);
    const __m512 x = _mm512_maskz_loadu_ps(there, p + 16 * i);
    // The scale of a key that the row does not see may be NaN: leave it out.
    const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    weighted[i] = _mm512_maskz_mul_ps(seen, x, _mm512_load_ps(scales.at + 16 * i));
    largest = _mm512_max_ps(largest, weighted[i]);
    sum = _mm512_add_ps(sum, weighted[i]);
  }
  float top = _mm512_reduce_max_ps(largest);
  const float total = _mm512_reduce_add_ps(sum);
  if (!(total < kHuge)) top = total;                // a maximum may drop a NaN, a sum does not
  const float lift = top < kTiny ? 0x1p60f : 1.0f;  // or the inverse would overflow
  const float inverse = top > 0 ? kSteps / (top * lift) : 0.0f;
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    const __m512 lifted = _mm512_mul_ps(weighted[i], _mm512_set1_ps(lift));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(lifted, _mm512_set1_ps(inverse)));
    _mm_store_si128(reinterpret_cast<__m128i*>(out.bytes[row][0] + 16 * i),
                    _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(out.bytes[row][1] + 16 * i),
                    _mm512_cvtepi32_epi8(whole));
  }
  out.step[row] = top * (256.0f / kSteps);
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
