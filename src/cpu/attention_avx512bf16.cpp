// Attention's inner loops over bf16 caches with AVX-512's bf16 dot product. The other side is f32
// and goes in as two bf16, the upper half and what it leaves, which keeps 16 bits. Nothing here may
// be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <immintrin.h>

#include <cstddef>

#include "cpu/attention_kernels.h"

namespace gyre::cpu {
namespace {

inline __mmask32 mask_of(size_t coordinates) {
  return coordinates >= 32 ? ~__mmask32{0} : (__mmask32{1} << coordinates) - 1;
}

inline __m512i load(const void* bf16, __mmask32 mask) {
  return _mm512_maskz_loadu_epi16(mask, bf16);
}

inline __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

inline __m512 add_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

// Lane i of the result is the sum of v[i]'s lanes.
inline __m128 sums_of(const __m512 (&v)[4]) {
  const __m512 all = add_pairs(add_pairs(v[0], v[2]), add_pairs(v[1], v[3]));
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// Up to four keys; none past the last is read.
template <size_t kRows>
void score_keys(const ScoreJob& job, size_t row, size_t key) {
  const size_t keys = job.key_count - key < 4 ? job.key_count - key : 4;
  const uint8_t* k[4];
  for (size_t i = 0; i < 4; ++i) k[i] = job.keys + (key + (i < keys ? i : 0)) * job.key_stride;
  __m512 acc[kRows][4];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i) acc[r][i] = _mm512_setzero_ps();
  }
  for (size_t c = 0; c < job.head_dim; c += 32) {
    const __mmask32 mask = mask_of(job.head_dim - c);
    __m512i coordinates[4];
    for (size_t i = 0; i < 4; ++i) coordinates[i] = load(k[i] + 2 * c, mask);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t half = 0; half < 2; ++half) {
        const __m512i q = load(job.q + 2 * ((2 * (row + r) + half) * job.head_dim + c), mask);
        for (size_t i = 0; i < 4; ++i) acc[r][i] = add_products(acc[r][i], q, coordinates[i]);
      }
    }
  }
  // A copy, small enough to be unrolled: or the loop above would write its sums to memory.
  __m512 products[kRows][4];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 4; ++i) products[r][i] = acc[r][i];
  }
  const auto mask = static_cast<__mmask8>((1u << keys) - 1);
  for (size_t r = 0; r < kRows; ++r)
    _mm_mask_storeu_ps(job.scores + (row + r) * kAttentionBlock + key, mask, sums_of(products[r]));
}

template <size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  for (size_t key = 0; key < job.key_count; key += 4) score_keys<kRows>(job, row, key);
}

void score_bf16(const ScoreJob& job) {
  size_t row = 0;
  for (; row + 2 <= job.rows; row += 2) score_rows<2>(job, row);
  if (row < job.rows) score_rows<1>(job, row);
}

// Probabilities in two parts; two keys side by side are one operand. Zeros follow the last key,
// which may stand alone.
struct Weights {
  alignas(64) uint16_t of[kAttentionRows][2][kAttentionBlock + 32];
};

void split_row(const float* p, size_t keys, uint16_t (&out)[2][kAttentionBlock + 32]) {
  for (size_t i = 0; i < kAttentionBlock; i += 16) {
    const auto mask = static_cast<__mmask16>(mask_of(keys > i ? keys - i : 0));
    const __m512 x = _mm512_maskz_loadu_ps(mask, p + i);
    const __m512i bits = _mm512_castps_si512(x);
    const __m512 upper =
        _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(~0xFFFFu))));
    // What is infinite leaves nothing.
    const __mmask16 rest = _mm512_cmp_ps_mask(x, upper, _CMP_NEQ_UQ);
    const __m256bh lower = _mm512_cvtneps_pbh(_mm512_maskz_sub_ps(rest, x, upper));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out[0] + i),
                       _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out[1] + i), reinterpret_cast<__m256i>(lower));
  }
  for (auto& part : out) part[kAttentionBlock] = 0;
}

inline __m512i two_keys(const uint16_t* weights) {
  int32_t pair = 0;
  __builtin_memcpy(&pair, weights, 4);
  return _mm512_set1_epi32(pair);
}

// Sums of 32 coordinates as interleaving two keys leaves them: of each eight the first four, and
// the last four. acc = acc * keep + sums, in order.
inline void store_sums(const __m512 (&sums)[2], __m512 keep, size_t coordinates, float* acc) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512 in_order[2] = {_mm512_permutex2var_ps(sums[0], first, sums[1]),
                              _mm512_permutex2var_ps(sums[0], second, sums[1])};
  const __mmask32 mask = mask_of(coordinates);
  for (size_t i = 0; i < 2; ++i) {
    const auto half = static_cast<__mmask16>(mask >> (16 * i));
    const __m512 old = _mm512_maskz_loadu_ps(half, acc + 16 * i);
    _mm512_mask_storeu_ps(acc + 16 * i, half, _mm512_fmadd_ps(old, keep, in_order[i]));
  }
}

// kRows rows and kChunks * 32 coordinates, of which the last may be missing.
template <size_t kRows, size_t kChunks>
inline void accumulate_chunk(const AccumulateJob& job, const Weights& weights, size_t row,
                             size_t c) {
  __m512 acc[kRows][kChunks][2];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kChunks; ++i) acc[r][i][0] = acc[r][i][1] = _mm512_setzero_ps();
  }
  for (size_t key = job.begin; key < job.end; key += 2) {
    __m512i v[kChunks][2];
    for (size_t i = 0; i < kChunks; ++i) {
      const __mmask32 mask = mask_of(job.head_dim - c - 32 * i);
      const uint8_t* const at = job.values + key * job.value_stride + 2 * (c + 32 * i);
      const __m512i one = load(at, mask);
      const bool alone = key + 1 == job.end;
      const __m512i two = load(alone ? at : at + job.value_stride, alone ? 0 : mask);
      v[i][0] = _mm512_unpacklo_epi16(one, two);
      v[i][1] = _mm512_unpackhi_epi16(one, two);
    }
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t part = 0; part < 2; ++part) {
        const __m512i p = two_keys(weights.of[row + r][part] + key);
        for (size_t i = 0; i < kChunks; ++i) {
          acc[r][i][0] = add_products(acc[r][i][0], p, v[i][0]);
          acc[r][i][1] = add_products(acc[r][i][1], p, v[i][1]);
        }
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 keep = _mm512_set1_ps(job.keep[row + r]);
    for (size_t i = 0; i < kChunks; ++i)
      store_sums(acc[r][i], keep, job.head_dim - c - 32 * i, place + 32 * i);
  }
}

template <size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row) {
  size_t c = 0;
  for (; c + 32 < job.head_dim; c += 64) accumulate_chunk<kRows, 2>(job, weights, row, c);
  if (c < job.head_dim) accumulate_chunk<kRows, 1>(job, weights, row, c);
}

void accumulate_bf16(const AccumulateJob& job) {
  Weights weights;
  for (size_t row = 0; row < job.rows; ++row)
    split_row(job.p + row * kAttentionBlock, job.end, weights.of[row]);
  size_t row = 0;
  for (; row + 4 <= job.rows; row += 4) accumulate_rows<4>(job, weights, row);
  for (; row + 2 <= job.rows; row += 2) accumulate_rows<2>(job, weights, row);
  if (row < job.rows) accumulate_rows<1>(job, weights, row);
}

}  // namespace

AttentionKernels avx512bf16_attention_kernels(const AttentionKernels& others) {
  AttentionKernels kernels = others;
  kernels.name = "avx512bf16";
  kernels.score_bf16 = score_bf16;
  kernels.accumulate_bf16 = accumulate_bf16;
  return kernels;
}

}  // namespace gyre::cpu
