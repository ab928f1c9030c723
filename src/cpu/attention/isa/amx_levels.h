#pragma once
// Levels of V as B operands of AMX's int8 MMA, and what becomes of its sums. All of it anonymous,
// so that each file has its own copy.

#include "cpu/attention/isa/amx_tiles.h"
#include "cpu/attention/isa/unpack_v_avx512.h"
#include "cpu/attention/isa/weights_avx512.h"

namespace gyre::cpu {
namespace {

inline __m512i join_hi_lo(const int32_t* hi, const int32_t* lo) {
  return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(hi), 8), _mm512_load_si512(lo));
}

// Levels of 16 coordinates of the block's values as a B operand: a row has four tokens of each
// coordinate, as V's tiles have.
template <uint32_t kFormat>
inline void pack_values(const AccumulateJob& job, size_t c, size_t coordinates, uint8_t* to) {
  constexpr size_t kTiles = kBlockKeys / kTile;
  if (job.tiles == kTiles) {  // loads that follow stores to another page may wait for them
    __m512i v[kTiles][2];
#pragma GCC unroll 8
    for (size_t tile = 0; tile < kTiles; ++tile)
      unpack_v_levels<kFormat>(job.values + tile * job.value_stride, job.head_dim, c, coordinates,
                               v[tile]);
#pragma GCC unroll 8
    for (size_t tile = 0; tile < kTiles; ++tile) {
      _mm512_store_si512(to + tile * 128, v[tile][0]);
      _mm512_store_si512(to + tile * 128 + 64, v[tile][1]);
    }
    return;
  }
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    __m512i v[2];
    unpack_v_levels<kFormat>(job.values + tile * job.value_stride, job.head_dim, c, coordinates, v);
    _mm512_store_si512(to + tile * 128, v[0]);
    _mm512_store_si512(to + tile * 128 + 64, v[1]);
  }
  for (size_t tile = job.tiles; tile < kBlockKeys / kTile; ++tile) {
    _mm512_store_si512(to + tile * 128, _mm512_setzero_si512());
    _mm512_store_si512(to + tile * 128 + 64, _mm512_setzero_si512());
  }
}

// acc = acc * rescale + sums, for a row and up to 16 coordinates.
inline void add_row(const AccumulateJob& job, const Weights& weights, const int32_t* hi,
                    const int32_t* lo, size_t row, size_t c, __mmask16 mask) {
  float* const place = job.acc + row * job.head_dim + c;
  const __m512 rescale = _mm512_set1_ps(job.rescale[row]);
  const __m512 step = _mm512_set1_ps(weights.step[row]);
  const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, place), rescale);
  // The step is worth 256: eight bits are behind the point.
  const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(join_hi_lo(hi, lo)), _mm512_set1_ps(0x1p-8f));
  _mm512_mask_storeu_ps(place, mask, _mm512_fmadd_ps(sum, step, old));
}

}  // namespace
}  // namespace gyre::cpu
