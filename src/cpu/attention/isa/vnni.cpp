// Attention's inner loops over levels with AVX-512's byte dot product, which multiplies bytes
// without a sign by bytes with one. Nothing here may be instantiated elsewhere: the file is
// compiled with instructions other machines lack.
#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/x86.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

inline __m512i look_up(const ByteTable& table, __m512i index) {
  return _mm512_shuffle_epi8(_mm512_load_si512(table.entry), index);
}

inline __m512i bytes_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// Shifts that bring the coordinates of a group of 16 bytes, 16 at a time, to the lowest bits.
inline __m512i group_shifts(int step, int first) {
  return _mm512_setr_epi64(first, first, first + step, first + step, first + 2 * step,
                           first + 2 * step, first + 3 * step, first + 3 * step);
}

inline __m512i four_times(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Two groups of 16 bytes, each twice: low nibbles, high nibbles.
inline __m512i nibbles(const uint8_t* bytes) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                                                 _mm512_castsi256_si512(raw));
  const __m512i shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
  return _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), bytes_of(15));
}

// 64 levels of a row of K, plus 128: bytes without a sign. Rows have whole groups of 16 bytes.
template <uint32_t kFormat>
inline __m512i key_levels(const uint8_t* row, size_t head_dim, size_t unit) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    return _mm512_xor_si512(_mm512_loadu_si512(row + unit * 64), bytes_of(0x80));
  } else {
    __m512i low;
    if constexpr (kLow == 2) {
      low = _mm512_and_si512(_mm512_srlv_epi64(four_times(row + unit * 16), group_shifts(2, 0)),
                             bytes_of(3));
    } else {
      low = nibbles(row + unit * 32);
    }
    if constexpr (kHigh == 0) return look_up(kLevels<kFormat, 128>, low);
    const uint8_t* const plane = row + head_dim * kLow / 8;
    __m512i high;
    if constexpr (kHigh == 1) {
      high = _mm512_srlv_epi64(four_times(plane + unit / 2 * 16),
                               group_shifts(1, unit % 2 == 0 ? 0 : 4));
    } else {
      high = _mm512_srlv_epi64(four_times(plane + unit * 16), group_shifts(2, 0));
    }
    high = _mm512_and_si512(high, bytes_of((1 << kHigh) - 1));
    if constexpr (kFormat == abi::kTq3)
      return look_up(kLevels<kFormat, 128>, _mm512_or_si512(low, _mm512_slli_epi16(high, 2)));
    return _mm512_add_epi8(look_up(kLevels<kFormat, 128>, low), _mm512_slli_epi16(high, 5));
  }
}

inline __m512i add_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline __m512i add_quads(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
inline __m512i add_lanes(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}

// Lane i of the result is the sum of v[i]'s lanes.
inline __m512i sums_of(const __m512i (&v)[16]) {
  __m512i quad[4];
  for (size_t i = 0; i < 4; ++i)
    quad[i] = add_quads(add_pairs(v[4 * i], v[4 * i + 1]), add_pairs(v[4 * i + 2], v[4 * i + 3]));
  return add_lanes(add_lanes(quad[0], quad[1]), add_lanes(quad[2], quad[3]));
}

// Products of four keys and kRows queries over one block of coordinates, 256 times the upper bytes'
// plus the lower bytes', not yet summed over lanes: out[row * 8 + key].
template <uint32_t kFormat, size_t kRows>
inline void multiply_keys(const ScoreJob& job, const uint8_t* keys, size_t row, size_t block,
                          __m512i* out) {
  __m512i acc[kRows][2][4];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i) acc[r][0][i] = acc[r][1][i] = _mm512_setzero_si512();
  }
  const size_t first = job.blocks->begin[block] / 64, units = job.blocks->size[block] / 64;
  for (size_t unit = first; unit < first + units; ++unit) {
    __m512i levels[4];
    for (size_t i = 0; i < 4; ++i)
      levels[i] = key_levels<kFormat>(keys + i * job.key_stride, job.head_dim, unit);
    for (size_t r = 0; r < kRows; ++r) {
      const int8_t* const q = job.q + 2 * (row + r) * job.head_dim + unit * 64;
      const __m512i upper = _mm512_loadu_si512(q), lower = _mm512_loadu_si512(q + job.head_dim);
      for (size_t i = 0; i < 4; ++i) {
        acc[r][0][i] = _mm512_dpbusd_epi32(acc[r][0][i], levels[i], upper);
        acc[r][1][i] = _mm512_dpbusd_epi32(acc[r][1][i], levels[i], lower);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i)
      out[r * 8 + i] = _mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]);
  }
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  for (size_t tile = 0; tile < job.key_count / kTile; ++tile) {
    const uint8_t* const keys = job.keys + tile * kTile * job.key_stride;
    __m256 score[kRows];
    for (size_t r = 0; r < kRows; ++r) score[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < job.blocks->count; ++b) {
      __m512i products[16];
      for (__m512i& product : products) product = _mm512_setzero_si512();
      multiply_keys<kFormat, kRows>(job, keys, row, b, products);
      multiply_keys<kFormat, kRows>(job, keys + 4 * job.key_stride, row, b, products + 4);
      const __m512i sums = sums_of(products);
      const __m256 scale = tile_scales(job.scales + tile * job.scales_stride + b * kTile * 2);
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i sum =
            r == 0 ? _mm512_castsi512_si256(sums) : _mm512_extracti64x4_epi64(sums, 1);
        // The levels' bias adds 128 times the sum of the query.
        const __m256i query_sum = _mm256_set1_epi32(job.q_sums[(row + r) * abi::kKvMaxScales + b]);
        const __m256i exact = _mm256_sub_epi32(sum, _mm256_slli_epi32(query_sum, 7));
        score[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, score[r]);
      }
    }
    for (size_t r = 0; r < kRows; ++r)
      _mm256_storeu_ps(job.scores + (row + r) * kBlockKeys + tile * kTile, score[r]);
  }
}

template <uint32_t kFormat>
void score_format(const ScoreJob& job) {
  size_t row = 0;
  for (; row + 2 <= job.rows; row += 2) score_rows<kFormat, 2>(job, row);
  if (row < job.rows) score_rows<kFormat, 1>(job, row);
}

void score_levels(const ScoreJob& job) {
  with_native_format(job.format, [&](auto format) { score_format<decltype(format)::value>(job); });
}

// Four tokens of each of 16 coordinates, a byte each, from a plane of 2 bits: tokens 0 to 3 or 4
// to 7.
inline __m512i field_tokens(const uint8_t* plane, size_t coordinates, size_t half) {
  const auto mask = static_cast<__mmask16>((1u << coordinates) - 1);
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, plane));
  const __m512i both = half == 0
                           ? _mm512_or_si512(x, _mm512_slli_epi32(x, 14))
                           : _mm512_or_si512(_mm512_srli_epi32(x, 4), _mm512_slli_epi32(x, 10));
  return _mm512_and_si512(both, bytes_of(3));
}

// The same from a plane of 1 bit.
inline __m512i bit_tokens(const uint8_t* plane, size_t coordinates, size_t half) {
  const auto mask = static_cast<__mmask16>((1u << coordinates) - 1);
  __m512i x = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, plane));
  if (half != 0) x = _mm512_srli_epi32(x, 4);
  const __m512i two = _mm512_or_si512(x, _mm512_slli_epi32(x, 7));
  return _mm512_and_si512(_mm512_or_si512(two, _mm512_slli_epi32(two, 14)), bytes_of(1));
}

inline __m512i nibble_tokens(const uint8_t* plane, size_t coordinates, size_t half) {
  const auto mask = static_cast<__mmask16>((1u << coordinates) - 1);
  const __m512i x = _mm512_maskz_loadu_epi32(mask, plane);
  return _mm512_and_si512(half == 0 ? x : _mm512_srli_epi16(x, 4), bytes_of(15));
}

// Levels of up to 16 coordinates of a tile of V: v[0] has tokens 0 to 3 of each, v[1] tokens 4
// to 7.
template <uint32_t kFormat>
inline void value_levels(const uint8_t* tile, size_t head_dim, size_t c, size_t coordinates,
                         __m512i (&v)[2]) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const uint8_t* const low_plane = tile + c * kLow;
  const uint8_t* const high_plane = tile + head_dim * kLow + c * kHigh;
  if constexpr (kFormat == abi::kTq8) {
    const __m512i early = _mm512_loadu_si512(low_plane);
    const __m512i late =
        coordinates == 16 ? _mm512_loadu_si512(low_plane + 64) : _mm512_setzero_si512();
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    v[0] = _mm512_permutex2var_epi32(early, even, late);
    v[1] = _mm512_permutex2var_epi32(early, _mm512_add_epi32(even, _mm512_set1_epi32(1)), late);
    return;
  }
  for (size_t half = 0; half < 2; ++half) {
    __m512i low = kLow == 2 ? field_tokens(low_plane, coordinates, half)
                            : nibble_tokens(low_plane, coordinates, half);
    if constexpr (kFormat == abi::kTq3)
      low = _mm512_or_si512(low, _mm512_slli_epi16(bit_tokens(high_plane, coordinates, half), 2));
    v[half] = look_up(kLevels<kFormat, 0>, low);
    if constexpr (kFormat == abi::kTq5)
      v[half] =
          _mm512_add_epi8(v[half], _mm512_slli_epi16(bit_tokens(high_plane, coordinates, half), 5));
    if constexpr (kFormat == abi::kTq6)
      v[half] = _mm512_add_epi8(v[half],
                                _mm512_slli_epi16(field_tokens(high_plane, coordinates, half), 5));
  }
}

// Probabilities of a block times the values' scales, in 16 bits against the largest of the row:
// upper bytes and lower bytes, token by token.
struct Weights {
  alignas(64) uint8_t bytes[kTileRows][2][kBlockKeys];
  float unit[kTileRows];
};

void store_weights(const AccumulateJob& job, const BlockScales& scales, size_t row, Weights& out) {
  __m256i whole[kBlockKeys / kTile];
  out.unit[row] = weigh_row<65535>(job, scales, row, whole);
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out.bytes[row][0] + tile * kTile),
                     _mm256_cvtepi32_epi8(_mm256_srli_epi32(whole[tile], 8)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out.bytes[row][1] + tile * kTile),
                     _mm256_cvtepi32_epi8(whole[tile]));
  }
}

inline __m512i four_tokens(const uint8_t* bytes) {
  int32_t word = 0;
  __builtin_memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// acc = acc * keep + sums, for kRows rows and kChunks * 16 coordinates, the last of which may be
// missing.
template <uint32_t kFormat, size_t kRows, size_t kChunks>
inline void accumulate_chunk(const AccumulateJob& job, const Weights& weights, size_t row, size_t c,
                             size_t coordinates) {
  __m512i acc[kRows][2][kChunks];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kChunks; ++i) acc[r][0][i] = acc[r][1][i] = _mm512_setzero_si512();
  }
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    __m512i v[kChunks][2];
    for (size_t i = 0; i < kChunks; ++i)
      value_levels<kFormat>(job.values + tile * job.value_stride, job.head_dim, c + 16 * i,
                            kChunks == 1 ? coordinates : 16, v[i]);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t plane = 0; plane < 2; ++plane) {
        for (size_t half = 0; half < 2; ++half) {
          const __m512i p = four_tokens(weights.bytes[row + r][plane] + tile * kTile + 4 * half);
          for (size_t i = 0; i < kChunks; ++i)
            acc[r][plane][i] = _mm512_dpbusd_epi32(acc[r][plane][i], p, v[i][half]);
        }
      }
    }
  }
  const auto mask = static_cast<__mmask16>(kChunks == 1 ? (1u << coordinates) - 1 : 0xFFFFu);
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 keep = _mm512_set1_ps(job.rescale[row + r]);
    const __m512 unit = _mm512_set1_ps(weights.unit[row + r]);
    for (size_t i = 0; i < kChunks; ++i) {
      const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]);
      const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, place + 16 * i), keep);
      // The unit is that of 256.
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(0x1p-8f));
      _mm512_mask_storeu_ps(place + 16 * i, mask, _mm512_fmadd_ps(sum, unit, old));
    }
  }
}

template <uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row, size_t block) {
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 32 <= end; c += 32) accumulate_chunk<kFormat, kRows, 2>(job, weights, row, c, 32);
  for (; c < end; c += 16)
    accumulate_chunk<kFormat, kRows, 1>(job, weights, row, c, end - c < 16 ? end - c : 16);
}

template <uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const BlockScales scales(job, block);
    for (size_t row = 0; row < job.rows; ++row) store_weights(job, scales, row, weights);
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      accumulate_rows<kFormat, decltype(rows)::value>(job, weights, row, block);
    });
  }
}

void accumulate_levels(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<decltype(format)::value>(job); });
}

}  // namespace

AttentionKernels vnni_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "avx512vnni";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.query_layout = QueryLayout::hi_then_lo;
  return kernels;
}

}  // namespace gyre::cpu
