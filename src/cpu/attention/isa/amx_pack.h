#pragma once
// Keys and values of f16 and bf16 as B operands of AMX's bf16 MMA, row by row: f16 as hi and lo,
// bf16 as hi alone. All of it anonymous, so that each file has its own copy.

#include "cpu/attention/isa/amx_split.h"
#include "cpu/attention/isa/non_finite_values.h"
#include "cpu/attention/isa/prompt_kernels.h"

namespace gyre::cpu {
namespace {

// 32 coordinates of a row of K from c on; coordinates past its end are 0.
template <bool kHalf>
inline Split load_key(const uint8_t* key, size_t c, size_t head_dim) {
  const size_t left = head_dim - c;
  if constexpr (!kHalf) {
    const auto mask = static_cast<__mmask32>(left < kDepth ? (uint64_t{1} << left) - 1 : ~0u);
    return {_mm512_maskz_loadu_epi16(mask, key + 2 * c), _mm512_setzero_si512()};
  }
  const __mmask16 upper = left > 16 ? first_lanes(left - 16) : __mmask16{0};
  return split_halves(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(left), key + 2 * c)),
                      _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(upper, key + 2 * c + 32)));
}

// Bytes of 16 packed keys.
template <bool kHalf>
constexpr size_t packed_key_bytes(size_t head_dim) {
  return round_up(head_dim, kDepth) / kDepth * (kHalf ? 2 : 1) * kTileBytes;
}

// [group of 16 keys][32 coordinates][hi, lo]: a row has a pair of coordinates of each key.
template <bool kHalf>
void pack_keys(const PromptBlock& from, size_t head_dim, uint8_t* packed) {
  const size_t end = round_up(from.end, 2 * kTileSide);  // groups are multiplied two at a time
  for (size_t group = from.begin / (2 * kTileSide) * (2 * kTileSide); group < end;
       group += kTileSide) {
    uint8_t* to = packed + group / kTileSide * packed_key_bytes<kHalf>(head_dim);
    for (size_t c = 0; c < head_dim; c += kDepth) {
      __m512i hi[kTileSide], lo[kTileSide];
      for (size_t i = 0; i < kTileSide; ++i) {
        const uint8_t* const key = from.rows[group + i];
        const Split parts = key == nullptr ? Split{_mm512_setzero_si512(), _mm512_setzero_si512()}
                                           : load_key<kHalf>(key, c, head_dim);
        hi[i] = parts.hi;
        lo[i] = parts.lo;
      }
      store_tile(hi, to);
      to += kTileBytes;
      if constexpr (!kHalf) continue;
      store_tile(lo, to);
      to += kTileBytes;
    }
  }
}

// 16 coordinates of a row of V; non-finite values are 0, and clear their bit in `finite`.
template <bool kHalf>
inline __m512 load_value(const uint8_t* row, size_t c, __mmask16 there, __mmask16& finite) {
  if (row == nullptr) return _mm512_setzero_ps();
  const __m256i stored = _mm256_maskz_loadu_epi16(there, row + 2 * c);
  const __m256i size = _mm256_and_si256(stored, _mm256_set1_epi16(0x7FFF));
  const __mmask16 good =
      _mm256_cmplt_epu16_mask(size, _mm256_set1_epi16(kHalf ? kHalfLimit : kBf16Limit));
  finite &= good;
  const __m256i clean = _mm256_maskz_mov_epi16(good, stored);
  if constexpr (kHalf) return _mm512_cvtph_ps(clean);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(clean), 16));
}

// Bytes of 32 values of 16 coordinates.
template <bool kHalf>
constexpr size_t kPackedValueBytes = (kHalf ? 2 : 1) * kTileBytes;

// [16 coordinates][32 keys][hi, lo], `lanes` keys in all: a row has a pair of neighbouring keys of
// each coordinate. Returns whether all are finite.
template <bool kHalf>
bool pack_values(const PromptBlock& from, size_t lanes, size_t head_dim, uint8_t* packed) {
  __mmask16 finite = 0xFFFF;
  for (size_t first = from.begin / kDepth * kDepth; first < from.end; first += kDepth) {
    for (size_t c = 0; c < head_dim; c += kTileSide) {
      const __mmask16 there = first_lanes(head_dim - c);
      uint8_t* const to =
          packed + (c / kTileSide * lanes + first) / kDepth * kPackedValueBytes<kHalf>;
      for (size_t i = 0; i < kTileSide; ++i) {
        const uint8_t* const* const pair = from.rows + first + 2 * i;
        const __m512 a = load_value<kHalf>(pair[0], c, there, finite);
        const __m512 b = load_value<kHalf>(pair[1], c, there, finite);
        if constexpr (kHalf) {
          const Split parts = split_halves(a, b);
          _mm512_store_si512(to + i * 64, parts.hi);
          _mm512_store_si512(to + i * 64 + kTileBytes, parts.lo);
        } else {
          _mm512_store_si512(to + i * 64, pair_up(_mm512_castps_si512(a), _mm512_castps_si512(b)));
        }
      }
    }
  }
  return finite == 0xFFFF;
}

}  // namespace
}  // namespace gyre::cpu
