// Decode attention's inner loops over levels with AVX2: levels are widened to 16 bits, once for all
// rows, and multiplied by 16-bit integers, pairs at a time. Nothing here may be instantiated
// elsewhere: the file is compiled with instructions other machines lack.
#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/unpack_x86.h"
#include "cpu/attention/isa/weights_x86.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

// sum += dot products of pairs. The optimization barrier keeps the compiler from adding these to
// each other first, which takes more registers than there are.
inline void add_pairs(__m256i& sum, __m256i a, __m256i b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(sum));
}

inline __m256i widen(__m256i levels, size_t half) {
  return _mm256_cvtepi8_epi16(half == 0 ? _mm256_castsi256_si128(levels)
                                        : _mm256_extracti128_si256(levels, 1));
}

// Multiplies two keys with kRows queries over one scale block; neighbouring lanes are summed:
// out[row * 4]. Sums fit: 256 coordinates of at most 127 * 256 times 128.
template <uint32_t kFormat, size_t kRows>
inline void multiply_keys(const ScoreJob& job, const uint8_t* keys, const int16_t* q, size_t block,
                          __m256i* out) {
  __m256i acc[kRows][2];
  for (size_t r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  const size_t first = job.blocks->begin[block] / 32, chunks = job.blocks->size[block] / 32;
  for (size_t chunk = first; chunk < first + chunks; ++chunk) {
    __m256i levels[2];
    for (size_t key = 0; key < 2; ++key)
      levels[key] = unpack_k<Avx2, kFormat, 0>(keys + key * job.key_stride, job.head_dim, chunk);
    for (size_t half = 0; half < 2; ++half) {
      const __m256i wide[2] = {widen(levels[0], half), widen(levels[1], half)};
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i query = Avx2::load(q + r * job.head_dim + chunk * 32 + half * 16);
        for (size_t key = 0; key < 2; ++key) add_pairs(acc[r][key], wide[key], query);
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

// A block's weights in 15 bits, a tile's tokens in the order in which levels are widened: 0 2, 1 3,
// 4 6, 5 7.
struct Weights {
  alignas(64) int16_t at[kTileRows][kBlockKeys];
  float step[kTileRows];  // the fixed-point scale: what 256 stands for
};

void store_weights(const AccumulateJob& job, const BlockScales& scales, size_t row, Weights& out) {
  __m256i whole[kBlockKeys / kTile];
  out.step[row] = round_row_weights<32767>(job, scales, row, whole);
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const __m256i ordered = _mm256_shuffle_epi32(whole[tile], _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packs_epi32(ordered, ordered), 0x08);
    _mm_store_si128(reinterpret_cast<__m128i*>(out.at[row] + tile * kTile),
                    _mm256_castsi256_si128(narrow));
  }
}

inline __m256i two_tokens(const int16_t* weights) {
  int32_t pair = 0;
  __builtin_memcpy(&pair, weights, 4);
  return _mm256_set1_epi32(pair);
}

// acc = acc * rescale + sums, for kRows rows and kChunks * 8 coordinates.
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
      unpack_v<Avx2, kFormat>(job.values + tile * job.value_stride, job.head_dim, c + 8 * i, v[i]);
    for (size_t pair = 0; pair < 4; ++pair) {
      __m256i wide[kChunks];
      for (size_t i = 0; i < kChunks; ++i) {
        const __m256i four = v[i][pair / 2];
        wide[i] = _mm256_srai_epi16(pair % 2 == 0 ? _mm256_slli_epi16(four, 8) : four, 8);
      }
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i p = two_tokens(weights.at[row + r] + tile * kTile + 2 * pair);
        for (size_t i = 0; i < kChunks; ++i) add_pairs(acc[r][i], wide[i], p);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m256 rescale = _mm256_set1_ps(job.rescale[row + r]);
    const __m256 step = _mm256_set1_ps(weights.step[row + r]);
    for (size_t i = 0; i < kChunks; ++i) {
      const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(place + 8 * i), rescale);
      // The step is worth 256: eight bits are behind the point.
      const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][i]), _mm256_set1_ps(0x1p-8f));
      _mm256_storeu_ps(place + 8 * i, _mm256_fmadd_ps(sum, step, old));
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
