// Decode attention's inner loops over levels with AVX-512's dot product of unsigned with signed
// bytes. Nothing here may be instantiated elsewhere: the file is compiled with instructions other
// machines lack.
#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/row_keys_avx512.h"
#include "cpu/attention/isa/vnni_products.h"
#include "cpu/attention/isa/weights_avx512.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

// Levels become unsigned bytes by adding 128.
constexpr int kBiasBits = 7, kBias = 1 << kBiasBits;

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
  const auto quad = [&](size_t i) {
    return add_quads(add_pairs(v[i], v[i + 1]), add_pairs(v[i + 2], v[i + 3]));
  };
  return add_lanes(add_lanes(quad(0), quad(4)), add_lanes(quad(8), quad(12)));
}

// Multiplies four keys with kRows queries over one scale block: 256 times the dot products with hi
// plus those with lo, not yet summed over lanes: out[row * 8 + key].
template <size_t kRows, class Keys>
inline void multiply_keys(const ScoreJob& job, const Keys& loader, const uint8_t* keys, size_t row,
                          size_t block, __m512i* out) {
  __m512i acc[kRows][2][4];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i) acc[r][0][i] = acc[r][1][i] = _mm512_setzero_si512();
  }
  const size_t first = job.blocks->begin[block] / 64, chunks = job.blocks->size[block] / 64;
  for (size_t chunk = first; chunk < first + chunks; ++chunk) {
    __m512i levels[4];
    for (size_t i = 0; i < 4; ++i)
      levels[i] = loader.template load<kBias>(keys + i * job.key_stride, chunk);
    for (size_t r = 0; r < kRows; ++r) {
      const int8_t* const q = job.q + 2 * (row + r) * job.head_dim + chunk * 64;
      const __m512i hi = _mm512_loadu_si512(q), lo = _mm512_loadu_si512(q + job.head_dim);
      for (size_t i = 0; i < 4; ++i) {
        add_products(acc[r][0][i], levels[i], hi);
        add_products(acc[r][1][i], levels[i], lo);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i)
      out[r * 8 + i] = _mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]);
  }
}

template <size_t kRows, class Keys>
void score_rows(const ScoreJob& job, const Keys& loader, size_t row) {
  for (size_t tile = 0; tile < job.key_count / kTile; ++tile) {
    const uint8_t* const keys = job.keys + tile * kTile * job.key_stride;
    __m256 score[kRows];
    for (size_t r = 0; r < kRows; ++r) score[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < job.blocks->count; ++b) {
      __m512i products[16];
      for (__m512i& product : products) product = _mm512_setzero_si512();
      multiply_keys<kRows>(job, loader, keys, row, b, products);
      multiply_keys<kRows>(job, loader, keys + 4 * job.key_stride, row, b, products + 4);
      const __m512i sums = sums_of(products);
      const __m256 scale = tile_scales(job.scales + tile * job.scales_stride + b * kTile * 2);
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i sum =
            r == 0 ? _mm512_castsi512_si256(sums) : _mm512_extracti64x4_epi64(sums, 1);
        // The levels' bias adds that many times the sum of the query.
        const __m256i query_sum = _mm256_set1_epi32(job.q_sums[(row + r) * abi::kKvMaxScales + b]);
        const __m256i exact = _mm256_sub_epi32(sum, _mm256_slli_epi32(query_sum, kBiasBits));
        score[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, score[r]);
      }
    }
    for (size_t r = 0; r < kRows; ++r)
      _mm256_storeu_ps(job.scores + (row + r) * kBlockKeys + tile * kTile, score[r]);
  }
}

void score_levels(const ScoreJob& job) {
  with_keys(job, [&](const auto& loader) {
    size_t row = 0;
    for (; row + 2 <= job.rows; row += 2) score_rows<2>(job, loader, row);
    if (row < job.rows) score_rows<1>(job, loader, row);
  });
}

inline __m512i four_tokens(const uint8_t* bytes) {
  int32_t word = 0;
  __builtin_memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// acc = acc * rescale + sums, for kRows rows and kChunks * 16 coordinates; with one chunk the last
// of them may be missing.
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
      unpack_v<Avx512, kFormat>(job.values + tile * job.value_stride, job.head_dim, c + 16 * i,
                                kChunks == 1 ? coordinates : 16, v[i]);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t plane = 0; plane < 2; ++plane) {
        for (size_t half = 0; half < 2; ++half) {
          const __m512i p = four_tokens(weights.bytes[row + r][plane] + tile * kTile + 4 * half);
          for (size_t i = 0; i < kChunks; ++i)
            add_products(acc[r][plane][i], p, v[i][half]);
        }
      }
    }
  }
  const auto mask = static_cast<__mmask16>(kChunks == 1 ? (1u << coordinates) - 1 : 0xFFFFu);
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 rescale = _mm512_set1_ps(job.rescale[row + r]);
    const __m512 step = _mm512_set1_ps(weights.step[row + r]);
    for (size_t i = 0; i < kChunks; ++i) {
      const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]);
      const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, place + 16 * i), rescale);
      // The step is worth 256: eight bits are behind the point.
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(0x1p-8f));
      _mm512_mask_storeu_ps(place + 16 * i, mask, _mm512_fmadd_ps(sum, step, old));
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
  kernels.odd_keys = true;
  return kernels;
}

}  // namespace gyre::cpu
