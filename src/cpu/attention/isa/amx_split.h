#pragma once
// Floats as sums of two bf16, hi and lo, for AMX's bf16 MMA. All of it anonymous, so that each file
// has its own copy.

#include "cpu/attention/isa/amx_tiles.h"
#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {
namespace {

constexpr size_t kDepth = 32;  // what a tile holds of 16 rows of bf16

constexpr size_t round_up(size_t x, size_t step) { return (x + step - 1) / step * step; }

// The first `lanes` lanes of 16.
constexpr __mmask16 first_lanes(size_t lanes) {
  return static_cast<__mmask16>(lanes < 16 ? (1u << lanes) - 1 : 0xFFFFu);
}

struct Split {
  __m512i hi, lo;
};

inline __m512i rounded_bits(__m512 x) {
  return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
}

// The upper halves of two vectors in pairs: lane i has a's below b's. Operands whose rows are cut
// into pairs alike need no order of their own, and pairs of lanes 16 apart need no shuffle.
inline __m512i pair_up(__m512i a, __m512i b) {
  return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b);
}

inline Split split_pairs(__m512 a, __m512 b, const __m512i (&hi)[2]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512 lo_a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(hi[0], upper)));
  const __m512 lo_b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(hi[1], upper)));
  return {pair_up(hi[0], hi[1]), pair_up(rounded_bits(lo_a), rounded_bits(lo_b))};
}

// Splits numbers far below the largest there is; a NaN may get lost.
inline Split split_nearest(__m512 a, __m512 b) {
  return split_pairs(a, b, {rounded_bits(a), rounded_bits(b)});
}

// Splits what was f16: 8 bits and the other 3, exactly. An infinity and a NaN stay in hi.
inline Split split_halves(__m512 a, __m512 b) {
  return split_pairs(a, b, {_mm512_castps_si512(a), _mm512_castps_si512(b)});
}

inline void store_tile(const __m512i (&rows)[kTileSide], uint8_t* to) {
  __m512i columns[kTileSide];
  transpose_lanes(rows, columns);
  for (size_t i = 0; i < kTileSide; ++i) _mm512_store_si512(to + i * 64, columns[i]);
}

// Two groups of 16 rows of A and two of 16 columns of B. A row of A has hi, and `lo` bytes on, lo;
// B has tiles of hi, each with its lo behind it if there is one.
struct SplitOperands {
  const uint8_t* a[2];
  size_t a_stride, lo;
  const uint8_t* b[2];
  size_t chunks;  // of 32 factors
};

// Adds a product of parts to tiles 0 to 3: the first rows times both groups of columns, then the
// second rows. kNewB: B's tiles are others than those of the call before. A load that goes to
// another tile than the MMAs before it read overlaps with them.
template <bool kNewB>
inline void multiply_parts(const SplitOperands& operands, size_t a, size_t b) {
  if constexpr (kNewB) {
    _tile_loadd(6, operands.b[0] + b, 64);
    _tile_loadd(7, operands.b[1] + b, 64);
  }
  _tile_loadd(4, operands.a[0] + a, operands.a_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, operands.a[1] + a, operands.a_stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Tiles 0 to 3 become hi hi, with kLoA and lo hi, with kLoB and hi lo. kTilesB: tiles of a chunk of
// B.
template <bool kLoA, bool kLoB, size_t kTilesB>
inline void multiply_split(const SplitOperands& operands) {
  zero_sums();
  for (size_t chunk = 0; chunk < operands.chunks; ++chunk) {
    const size_t a = chunk * 64, b = chunk * kTilesB * kTileBytes;
    multiply_parts<true>(operands, a, b);
    if constexpr (kLoA) multiply_parts<false>(operands, a + operands.lo, b);
    if constexpr (kLoB) multiply_parts<true>(operands, a, b + kTileBytes);
  }
}

}  // namespace
}  // namespace gyre::cpu
