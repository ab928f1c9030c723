// Attention's inner loops over levels with AVX2: levels are widened to 16 bits, once for all rows,
// and multiplied by 16-bit integers, pairs at a time. Nothing here may be instantiated elsewhere:
// the file is compiled with instructions other machines lack.
#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/x86.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

inline __m256i load(const void* bytes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(bytes));
}
inline __m128i load_half(const void* bytes) {
  return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
}
inline __m256i bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// sum += products of pairs. Opaque to the compiler, which would add the products to each other
// first and run out of registers.
inline void add_products(__m256i& sum, __m256i a, __m256i b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(sum));
}

template <uint32_t kFormat>
inline __m256i look_up(__m256i index) {
  return _mm256_shuffle_epi8(load(kLevels<kFormat, 0>.entry), index);
}

// A group of 16 bytes twice, shifted so that 32 coordinates, part of the group, are in the lowest
// kBits of a byte each; what else is in the byte is cleared.
template <uint32_t kBits>
inline __m256i plane_codes(const uint8_t* plane, size_t part) {
  constexpr size_t kParts = 4 / kBits;  // of a group
  const __m256i group = _mm256_broadcastsi128_si256(load_half(plane + part / kParts * 16));
  const auto first = static_cast<int64_t>(part % kParts * 2 * kBits);
  const __m256i shifts =
      _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 0, kBits, kBits));
  return _mm256_and_si256(_mm256_srlv_epi64(group, shifts), bytes_of((1 << kBits) - 1));
}

template <uint32_t kFormat>
inline __m256i join_planes(__m256i low, __m256i high) {
  return kFormat == abi::kTq3 ? look_up<kFormat>(_mm256_or_si256(low, _mm256_slli_epi16(high, 2)))
                              : _mm256_add_epi8(look_up<kFormat>(low), _mm256_slli_epi16(high, 5));
}

// 32 levels of a row of K, a byte each. Rows have whole groups of 16 bytes.
template <uint32_t kFormat>
inline __m256i key_levels(const uint8_t* row, size_t head_dim, size_t part) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    return load(row + part * 32);
  } else if constexpr (kHigh == 0) {
    return look_up<kFormat>(plane_codes<kLow>(row, part));
  } else {
    return join_planes<kFormat>(plane_codes<kLow>(row, part),
                                plane_codes<kHigh>(row + head_dim * kLow / 8, part));
  }
}

inline __m256i widen(__m256i levels, size_t half) {
  return _mm256_cvtepi8_epi16(half == 0 ? _mm256_castsi256_si128(levels)
                                        : _mm256_extracti128_si256(levels, 1));
}

// Products of two keys and kRows queries over one block of coordinates; neighbours are summed:
// out[row * 4]. Whole sums fit: 256 coordinates of at most 127 * 256 times 128.
template <uint32_t kFormat, size_t kRows>
inline void multiply_keys(const ScoreJob& job, const uint8_t* keys, const int16_t* q, size_t block,
                          __m256i* out) {
  __m256i acc[kRows][2];
  for (size_t r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  const size_t first = job.blocks->begin[block] / 32, parts = job.blocks->size[block] / 32;
  for (size_t part = first; part < first + parts; ++part) {
    __m256i levels[2];
    for (size_t key = 0; key < 2; ++key)
      levels[key] = key_levels<kFormat>(keys + key * job.key_stride, job.head_dim, part);
    for (size_t half = 0; half < 2; ++half) {
      const __m256i wide[2] = {widen(levels[0], half), widen(levels[1], half)};
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i query = load(q + r * job.head_dim + part * 32 + half * 16);
        for (size_t key = 0; key < 2; ++key) add_products(acc[r][key], wide[key], query);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) out[r * 4] = _mm256_hadd_epi32(acc[r][0], acc[r][1]);
}

// Lane i of the result is the sum for key i of a tile.
inline __m256i sums_of(const __m256i* pairs) {
  const __m256i early = _mm256_hadd_epi32(pairs[0], pairs[1]);
  const __m256i late = _mm256_hadd_epi32(pairs[2], pairs[3]);
  return _mm256_add_epi32(_mm256_permute2x128_si256(early, late, 0x20),
                          _mm256_permute2x128_si256(early, late, 0x31));
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  const int16_t* const q = reinterpret_cast<const int16_t*>(job.q) + row * job.head_dim;
  for (size_t tile = 0; tile < job.key_count / kTile; ++tile) {
    const uint8_t* const keys = job.keys + tile * kTile * job.key_stride;
    __m256 score[kRows];
    for (size_t r = 0; r < kRows; ++r) score[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < job.blocks->count; ++b) {
      __m256i products[kRows * 4];
      for (size_t pair = 0; pair < 4; ++pair)
        multiply_keys<kFormat, kRows>(job, keys + 2 * pair * job.key_stride, q, b, products + pair);
      const __m256 scale = tile_scales(job.scales + tile * job.scales_stride + b * kTile * 2);
      for (size_t r = 0; r < kRows; ++r)
        score[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of(products + r * 4)), scale, score[r]);
    }
    for (size_t r = 0; r < kRows; ++r)
      _mm256_storeu_ps(job.scores + (row + r) * kBlockKeys + tile * kTile, score[r]);
  }
}

template <uint32_t kFormat>
void score_format(const ScoreJob& job) {
  size_t row = 0;
  for (; row + 4 <= job.rows; row += 4) score_rows<kFormat, 4>(job, row);
  if (job.rows - row == 3) return score_rows<kFormat, 3>(job, row);
  if (job.rows - row == 2) return score_rows<kFormat, 2>(job, row);
  if (job.rows - row == 1) return score_rows<kFormat, 1>(job, row);
}

void score_levels(const ScoreJob& job) {
  with_native_format(job.format, [&](auto format) { score_format<decltype(format)::value>(job); });
}

// Eight coordinates of a tile of V, 32 bits each, from a plane of 4, 2 or 1 bits: four tokens of a
// byte each, 0 to 3 or, with half, 4 to 7.
template <uint32_t kBits>
inline __m256i plane_tokens(const uint8_t* plane, size_t half) {
  __m256i tokens;
  if constexpr (kBits == 4) {
    const __m256i x = load(plane);
    tokens = half == 0 ? x : _mm256_srli_epi16(x, 4);
  } else if constexpr (kBits == 2) {
    const __m256i x = _mm256_cvtepu16_epi32(load_half(plane));
    tokens = half == 0 ? _mm256_or_si256(x, _mm256_slli_epi32(x, 14))
                       : _mm256_or_si256(_mm256_srli_epi32(x, 4), _mm256_slli_epi32(x, 10));
  } else {
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane)));
    if (half != 0) x = _mm256_srli_epi32(x, 4);
    const __m256i two = _mm256_or_si256(x, _mm256_slli_epi32(x, 7));
    tokens = _mm256_or_si256(two, _mm256_slli_epi32(two, 14));
  }
  return _mm256_and_si256(tokens, bytes_of((1 << kBits) - 1));
}

// Levels of eight coordinates of a tile of V: v[0] has tokens 0 to 3 of each, v[1] tokens 4 to 7.
template <uint32_t kFormat>
inline void value_levels(const uint8_t* tile, size_t head_dim, size_t c, __m256i (&v)[2]) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const uint8_t* const low_plane = tile + c * kLow;
  if constexpr (kFormat == abi::kTq8) {
    // Coordinates 0 and 1 beside 4 and 5, so that the shuffle leaves them in order.
    const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(low_plane)),
                                              load_half(low_plane + 32), 1);
    const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(low_plane + 16)),
                                              load_half(low_plane + 48), 1);
    const __m256 early = _mm256_castsi256_ps(a), late = _mm256_castsi256_ps(b);
    v[0] = _mm256_castps_si256(_mm256_shuffle_ps(early, late, 0x88));
    v[1] = _mm256_castps_si256(_mm256_shuffle_ps(early, late, 0xDD));
  } else {
    const uint8_t* const high_plane = tile + head_dim * kLow + c * kHigh;
    for (size_t half = 0; half < 2; ++half) {
      const __m256i low = plane_tokens<kLow>(low_plane, half);
      if constexpr (kHigh == 0) {
        v[half] = look_up<kFormat>(low);
      } else {
        v[half] = join_planes<kFormat>(low, plane_tokens<kHigh>(high_plane, half));
      }
    }
  }
}

// Probabilities of a block times the values' scales, in 15 bits against the largest of the row. A
// tile's tokens in the order in which levels are widened: 0 2, 1 3, 4 6, 5 7.
struct Weights {
  alignas(64) int16_t of[kTileRows][kBlockKeys];
  float unit[kTileRows];
};

void store_weights(const AccumulateJob& job, const BlockScales& scales, size_t row, Weights& out) {
  __m256i whole[kBlockKeys / kTile];
  out.unit[row] = weigh_row<32767>(job, scales, row, whole);
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const __m256i turned = _mm256_shuffle_epi32(whole[tile], _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packs_epi32(turned, turned), 0x08);
    _mm_store_si128(reinterpret_cast<__m128i*>(out.of[row] + tile * kTile),
                    _mm256_castsi256_si128(narrow));
  }
}

inline __m256i two_tokens(const int16_t* weights) {
  int32_t pair = 0;
  __builtin_memcpy(&pair, weights, 4);
  return _mm256_set1_epi32(pair);
}

// acc = acc * keep + sums, for kRows rows and kChunks * 8 coordinates.
template <uint32_t kFormat, size_t kRows, size_t kChunks>
inline void accumulate_chunk(const AccumulateJob& job, const Weights& weights, size_t row,
                             size_t c) {
  __m256i acc[kRows][kChunks];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kChunks; ++i) acc[r][i] = _mm256_setzero_si256();
  }
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    __m256i v[kChunks][2];
    for (size_t i = 0; i < kChunks; ++i)
      value_levels<kFormat>(job.values + tile * job.value_stride, job.head_dim, c + 8 * i, v[i]);
    for (size_t pair = 0; pair < 4; ++pair) {
      __m256i wide[kChunks];
      for (size_t i = 0; i < kChunks; ++i) {
        const __m256i four = v[i][pair / 2];
        wide[i] = _mm256_srai_epi16(pair % 2 == 0 ? _mm256_slli_epi16(four, 8) : four, 8);
      }
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i p = two_tokens(weights.of[row + r] + tile * kTile + 2 * pair);
        for (size_t i = 0; i < kChunks; ++i) add_products(acc[r][i], wide[i], p);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m256 keep = _mm256_set1_ps(job.rescale[row + r]);
    const __m256 unit = _mm256_set1_ps(weights.unit[row + r]);
    for (size_t i = 0; i < kChunks; ++i) {
      const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(place + 8 * i), keep);
      // The unit is that of 256.
      const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][i]), _mm256_set1_ps(0x1p-8f));
      _mm256_storeu_ps(place + 8 * i, _mm256_fmadd_ps(sum, unit, old));
    }
  }
}

template <uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row, size_t block) {
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 16 <= end; c += 16) accumulate_chunk<kFormat, kRows, 2>(job, weights, row, c);
  if (c < end) accumulate_chunk<kFormat, kRows, 1>(job, weights, row, c);
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

AttentionKernels avx2_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "avx2";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.query_layout = QueryLayout::int16;
  return kernels;
}

}  // namespace gyre::cpu
