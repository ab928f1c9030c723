// A prompt's inner loops over f16 and bf16 with AMX's bf16 MMA. Nothing here may be instantiated
// elsewhere: the file is compiled with instructions other machines lack.
//
// A query in f32 is split into two bf16, hi, the nearest, and lo, the nearest to the rest; f16 is
// hi plus lo exactly, bf16 is hi alone. Of a product of two splits lo times lo is left out, 2^-16
// of it at most: three MMA over f16, two over bf16. An absolute error in a logit is a relative one
// in a probability, so that one would not do. Probabilities are the nearest bf16: a relative error
// of 2^-8 each at most, whatever the others are; over values of f16 two MMA, over bf16 one.
//
// The instruction flushes subnormal numbers: what is below 1e-38 is lost. What is not finite:
// scores that are not are computed again from hi alone, as a lo beside an infinity is NaN, or 0, or
// of the other sign. Values become 0 in the operand, and are added to the rows that see them.
#include <cstddef>

#include "cpu/attention/isa/amx_split.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/non_finite_values.h"
#include "cpu/attention/isa/prefetch.h"
#include "gyre/format.h"

namespace gyre::cpu {
namespace {

constexpr int kNotFinite = 0x99;  // fpclass: NaN of both kinds, infinities of both signs
constexpr uint32_t kF16 = static_cast<uint32_t>(KvFormat::f16);

// Rounding must not make an infinity of a large number, nor a number of a NaN: the first is cut,
// the second replaced.
inline __m512 fit(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x),
                upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 large =
      _mm512_cmp_epi32_mask(size, _mm512_set1_epi32(0x7F7F0000), _MM_CMPINT_NLE);
  const __mmask16 nan = _mm512_cmp_epi32_mask(size, _mm512_set1_epi32(0x7F800000), _MM_CMPINT_NLE);
  const __m512i cut = _mm512_mask_and_epi32(bits, large, bits, upper);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(cut, nan, _mm512_set1_epi32(0x7FC00000)));
}

// Splits 32 coordinates of a query, in the pairs that keys have: f16 is widened, and pairs up
// coordinates 16 apart; bf16 is as it is stored, neighbours beside each other.
inline Split split_query(const float* q, bool half) {
  const __m512 a = fit(_mm512_load_ps(q)), b = fit(_mm512_load_ps(q + 16));
  if (half) return split_nearest(a, b);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return split_nearest(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

// Queries become A operands in their own place: of a row all hi, then all lo, each padded with
// zeros to whole tiles. From the last row on: rows get longer.
uint32_t split_queries(float* q, uint32_t rows, uint32_t head_dim, uint32_t format) {
  const size_t padded = round_up(head_dim, kDepth);
  alignas(64) float row[abi::kKvMaxHeadDim] = {};
  for (size_t r = rows; r-- > 0;) {
    for (size_t c = 0; c < head_dim; ++c) row[c] = q[r * head_dim + c];
    float* const to = q + r * padded;
    for (size_t c = 0; c < padded; c += kDepth) {
      const Split parts = split_query(row + c, format == kF16);
      _mm512_storeu_si512(to + c / 2, parts.hi);
      _mm512_storeu_si512(to + (padded + c) / 2, parts.lo);
    }
  }
  return static_cast<uint32_t>(padded);
}

// 32 coordinates of a row of K from c on; those past its end are 0.
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

// Keys as B operands, [group of 16 keys][32 coordinates][hi, lo]: a row has a pair of coordinates
// of each key. bf16 has no lo.
template <bool kHalf>
void pack_keys(const ScoreJob& job, uint8_t* to) {
  for (size_t group = 0; group < job.key_count; group += kTileSide) {
    prefetch_steps(job.prefetch, group, group + kTileSide);
    for (size_t c = 0; c < job.head_dim; c += kDepth) {
      __m512i hi[kTileSide], lo[kTileSide];
      for (size_t i = 0; i < kTileSide; ++i) {
        const size_t key = group + i < job.key_count ? group + i : group;  // replaced, not read
        const Split parts = load_key<kHalf>(job.keys + key * job.key_stride, c, job.head_dim);
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
  stores_are_done();
}

// Dot products of two groups of 16 queries with two groups of 16 keys: the first queries with both
// groups of keys, then the second. A group that is not there is replaced.
template <bool kHalf, bool kHiAlone>
void multiply_keys(const ScoreJob& job, const uint8_t* packed, size_t row, size_t group,
                   TileSums<float>& sums) {
  constexpr size_t kStep = (kHalf ? 2 : 1) * kTileBytes;
  const size_t padded = round_up(job.head_dim, kDepth), chunks = padded / kDepth;
  const size_t stride = padded * sizeof(float), lo = padded * 2;
  const auto* const q = reinterpret_cast<const uint8_t*>(job.q_f32) + row * stride;
  const auto* const more_q = row + kTileSide < job.rows ? q + kTileSide * stride : q;
  const uint8_t* const k = packed + group * chunks * kStep;
  const uint8_t* const more_k = (group + 1) * kTileSide < job.key_count ? k + chunks * kStep : k;
  multiply_split<!kHiAlone, kHalf && !kHiAlone, kHalf ? 2 : 1>(
      {{q, more_q}, stride, lo, {k, more_k}, chunks});
  _tile_stored(0, sums.at[0], 64);
  _tile_stored(1, sums.at[1], 64);
  _tile_stored(2, sums.at[2], 64);
  _tile_stored(3, sums.at[3], 64);
}

// Stores the scores of a group of queries and a group of keys, and returns whether some is not
// finite. With `again` only such are stored.
bool store_scores(const ScoreJob& job, const float (&sums)[kTileSide][kTileSide], size_t row,
                  size_t key, bool again) {
  const size_t rows = job.rows - row < kTileSide ? job.rows - row : kTileSide;
  const size_t keys = job.key_count - key;
  const auto mask = static_cast<__mmask16>(keys < kTileSide ? (1u << keys) - 1 : 0xFFFFu);
  __mmask16 non_finite = 0;
  for (size_t r = 0; r < rows; ++r) {
    float* const at = job.scores + (row + r) * kBlockKeys + key;
    const __m512 score = _mm512_load_ps(sums[r]);
    if (again) {
      const __mmask16 wrong =
          _mm512_mask_fpclass_ps_mask(mask, _mm512_maskz_loadu_ps(mask, at), kNotFinite);
      _mm512_mask_storeu_ps(at, wrong, score);
    } else {
      non_finite |= _mm512_mask_fpclass_ps_mask(mask, score, kNotFinite);
      _mm512_mask_storeu_ps(at, mask, score);
    }
  }
  return non_finite != 0;
}

bool store_scores(const ScoreJob& job, const TileSums<float>& sums, size_t row, size_t group,
                  bool again) {
  bool non_finite = false;
  for (size_t i = 0; i < 4; ++i) {
    const size_t r = row + i / 2 * kTileSide, key = (group + i % 2) * kTileSide;
    if (r < job.rows && key < job.key_count)
      non_finite |= store_scores(job, sums.at[i], r, key, again);
  }
  return non_finite;
}

template <bool kHalf>
void score_format(const ScoreJob& job) {
  auto* const packed = static_cast<uint8_t*>(job.scratch);
  if (job.fresh) pack_keys<kHalf>(job, packed);
  TileSums<float> sums;
  for (size_t group = 0; group * kTileSide < job.key_count; group += 2) {
    for (size_t row = 0; row < job.rows; row += 2 * kTileSide) {
      multiply_keys<kHalf, false>(job, packed, row, group, sums);
      if (!store_scores(job, sums, row, group, false)) continue;
      multiply_keys<kHalf, true>(job, packed, row, group, sums);
      store_scores(job, sums, row, group, true);
    }
  }
}

void score_prompt(const ScoreJob& job) {
  return job.format == kF16 ? score_format<true>(job) : score_format<false>(job);
}

// Probabilities as A operands, the nearest bf16 each, in pairs of keys 16 apart.
struct Probabilities {
  alignas(64) uint32_t at[kTileRows][kBlockKeys / 2];

  explicit Probabilities(const AccumulateJob& job) {
    // Around the block's lanes a row may hold anything.
    const uint64_t lanes = ~uint64_t{0} >> (kBlockKeys - job.tiles * abi::kKvTile) << job.offset;
    const auto load = [&](const float* p, size_t key) {
      return rounded_bits(
          _mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes >> key), p + key - job.offset));
    };
    for (size_t r = 0; r < job.rows; ++r) {
      const float* const p = job.p + r * kBlockKeys;
      for (size_t key = 0; key < kBlockKeys; key += kDepth)
        _mm512_store_si512(at[r] + key / 2, pair_up(load(p, key), load(p, key + 16)));
    }
    stores_are_done();
  }
};

// Stands in for a token that is not there: 0 times what its slot holds could be NaN.
alignas(64) constexpr uint8_t kZeros[2 * abi::kKvMaxHeadDim] = {};

// Where the block's tokens lie. Each has the place that it has in a whole block: a tile product
// sums them in its own order.
struct Tokens {
  const uint8_t* at[kBlockKeys];
  explicit Tokens(const AccumulateJob& job) {
    for (const uint8_t*& token : at) token = kZeros;
    for (size_t key = job.begin; key < job.end; ++key)
      at[job.offset + key] = job.values + key * job.value_stride;
  }
};

// 16 coordinates of a token; what is not finite is 0, and its bit in `finite` too.
template <bool kHalf>
inline __m512 load_token(const uint8_t* token, size_t c, __mmask16 there, __mmask16& finite) {
  const __m256i stored = _mm256_maskz_loadu_epi16(there, token + 2 * c);
  const __m256i size = _mm256_and_si256(stored, _mm256_set1_epi16(0x7FFF));
  const __mmask16 good =
      _mm256_cmplt_epu16_mask(size, _mm256_set1_epi16(kHalf ? kHalfLimit : kBf16Limit));
  finite &= good;
  const __m256i clean = _mm256_maskz_mov_epi16(good, stored);
  if constexpr (kHalf) return _mm512_cvtph_ps(clean);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(clean), 16));
}

// 16 coordinates of the block's values as B operands, [32 tokens][hi, lo]: a row has a pair of
// tokens, 16 apart, of each coordinate. bf16 has no lo. Returns whether all are finite.
template <bool kHalf>
bool pack_values(const AccumulateJob& job, const Tokens& tokens, size_t c, uint8_t* to) {
  const __mmask16 there = first_lanes(job.head_dim - c);
  __mmask16 finite = 0xFFFF;
  for (size_t first = 0; first < kBlockKeys; first += kDepth, to += 2 * kTileBytes) {
    for (size_t i = 0; i < kTileSide; ++i) {
      const __m512 a = load_token<kHalf>(tokens.at[first + i], c, there, finite);
      const __m512 b = load_token<kHalf>(tokens.at[first + i + 16], c, there, finite);
      if constexpr (kHalf) {
        const Split parts = split_halves(a, b);
        _mm512_store_si512(to + i * 64, parts.hi);
        _mm512_store_si512(to + i * 64 + kTileBytes, parts.lo);
      } else {
        _mm512_store_si512(to + i * 64, pair_up(_mm512_castps_si512(a), _mm512_castps_si512(b)));
      }
    }
  }
  return finite == 0xFFFF;
}

// acc = acc * rescale + sums, for up to 16 rows and 16 coordinates.
inline void add_values(const AccumulateJob& job, const float (&sums)[kTileSide][kTileSide],
                       size_t row, size_t c) {
  const size_t rows = job.rows - row < kTileSide ? job.rows - row : kTileSide;
  const size_t left = job.head_dim - c;
  const auto mask = static_cast<__mmask16>(left < kTileSide ? (1u << left) - 1 : 0xFFFFu);
  for (size_t r = 0; r < rows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 rescale = _mm512_set1_ps(job.rescale[row + r]);
    const __m512 sum =
        _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, place), rescale, _mm512_load_ps(sums[r]));
    _mm512_mask_storeu_ps(place, mask, sum);
  }
}

constexpr size_t kValueBytes = kBlockKeys / kDepth * 2 * kTileBytes;  // of 16 coordinates

// All of V as B operands, [16 coordinates][32 tokens][hi, lo], and whether something is not finite.
struct PackedValues {
  uint8_t at[abi::kKvMaxHeadDim / kTileSide * kValueBytes];
  bool non_finite;

  template <bool kHalf>
  void pack(const AccumulateJob& job) {
    const Tokens tokens(job);
    non_finite = false;
    for (size_t c = 0; c < job.head_dim; c += kTileSide) {
      prefetch_steps(job.prefetch, c / 8, c / 8 + kTileSide / 8);
      non_finite |= !pack_values<kHalf>(job, tokens, c, at + c / kTileSide * kValueBytes);
    }
    stores_are_done();
  }
};
static_assert(sizeof(PackedValues) <= kValueScratchBytes);

// Two groups of rows times 16 coordinates, whose values are at v. Tiles 4 to 7 hold the
// probabilities: 32 keys of both groups, then the other 32.
template <bool kHalf>
inline void multiply_values(const uint8_t* v, float (&sums)[2][kTileSide][kTileSide]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, v, 64);
  _tile_loadd(3, v + (kHalf ? 1 : 2) * kTileBytes, 64);
  _tile_dpbf16ps(0, 4, 2);
  _tile_dpbf16ps(1, 5, 2);
  if constexpr (kHalf) {
    _tile_dpbf16ps(0, 4, 3);
    _tile_dpbf16ps(1, 5, 3);
    _tile_loadd(2, v + 2 * kTileBytes, 64);
    _tile_loadd(3, v + 3 * kTileBytes, 64);
    _tile_dpbf16ps(0, 6, 2);
    _tile_dpbf16ps(1, 7, 2);
  }
  _tile_dpbf16ps(0, 6, 3);
  _tile_dpbf16ps(1, 7, 3);
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
}

template <bool kHalf>
void accumulate_format(const AccumulateJob& job) {
  constexpr size_t kStride = kBlockKeys / 2 * sizeof(uint32_t);
  auto* const packed = static_cast<PackedValues*>(job.scratch);
  if (job.fresh) packed->pack<kHalf>(job);
  const Probabilities p(job);
  alignas(64) float sums[2][2][kTileSide][kTileSide];  // while one is read the other is written
  for (size_t row = 0; row < job.rows; row += 2 * kTileSide) {
    const size_t second_row = row + kTileSide < job.rows ? row + kTileSide : row;
    _tile_loadd(4, p.at[row], kStride);
    _tile_loadd(5, p.at[second_row], kStride);
    _tile_loadd(6, p.at[row] + kDepth / 2, kStride);
    _tile_loadd(7, p.at[second_row] + kDepth / 2, kStride);
    for (size_t c = 0; c < job.head_dim; c += kTileSide) {
      auto& out = sums[c / kTileSide % 2];
      multiply_values<kHalf>(packed->at + c / kTileSide * kValueBytes, out);
      add_values(job, out[0], row, c);
      if (second_row != row) add_values(job, out[1], second_row, c);
    }
  }
  if (!packed->non_finite) return;
  add_non_finite_values(job, kHalf ? kHalfLimit : kBf16Limit, [](uint16_t stored) {
    if constexpr (kHalf) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(stored)));
    return __builtin_bit_cast(float, static_cast<uint32_t>(stored) << 16);
  });
}

void accumulate_prompt(const AccumulateJob& job) {
  return job.format == kF16 ? accumulate_format<true>(job) : accumulate_format<false>(job);
}

}  // namespace

void add_amx_prompt_kernels(AttentionKernels& kernels) {
  kernels.split_queries = split_queries;
  kernels.score_prompt = score_prompt;
  kernels.accumulate_prompt = accumulate_prompt;
  kernels.f16_arithmetic = kernels.bf16_arithmetic = "bf16";
}

}  // namespace gyre::cpu
