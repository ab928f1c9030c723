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

}  // namespace
}  // namespace gyre::cpu
