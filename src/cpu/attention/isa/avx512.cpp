// Decode attention's inner loops over f16 and bf16, widened to f32, with AVX-512. Nothing here may
// be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <immintrin.h>

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/prefetch.h"

namespace gyre::cpu {
namespace {

constexpr size_t kLanes = 16;

struct F16 {
  static __m512 widen(__m256i stored) { return _mm512_cvtph_ps(stored); }
};
struct Bf16 {
  static __m512 widen(__m256i stored) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
  }
};

inline __m256i load_half(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// The first eight lanes: head dims are multiples of eight.
constexpr __mmask16 kEight = 0xFF;

inline __m512 add_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
inline __m512 add_quads(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline __m512 add_lanes(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Lane i of the result is the sum of v[i]'s lanes.
inline __m512 sums_of(const __m512 (&v)[16]) {
  const auto quad = [&](size_t i) {
    return add_quads(add_pairs(v[i], v[i + 1]), add_pairs(v[i + 2], v[i + 3]));
  };
  return add_lanes(add_lanes(quad(0), quad(4)), add_lanes(quad(8), quad(12)));
}

// sums[r * kKeys + i] += query[r] times key i, for 16 coordinates or, masked, eight.
template <class T, size_t kRows, size_t kKeys>
inline void add_products(const float* q, size_t q_stride, const uint8_t* const (&k)[kKeys],
                         size_t c, __mmask16 mask, __m512 (&sums)[16]) {
  __m512 query[kRows];
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) query[r] = _mm512_maskz_loadu_ps(mask, q + r * q_stride + c);
#pragma GCC unroll 16
  for (size_t i = 0; i < kKeys; ++i) {
    const __m512 wide = T::widen(_mm256_maskz_loadu_epi16(mask, k[i] + 2 * c));
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r)
      sums[r * kKeys + i] = _mm512_fmadd_ps(query[r], wide, sums[r * kKeys + i]);
  }
}

// Dot products of kRows queries with 16 / kRows keys, so that 16 sums hide the latency of the add.
// A key that is not there is replaced, not read.
template <class T, size_t kRows>
inline void score_keys(const ScoreJob& job, size_t row, size_t key) {
  constexpr size_t kKeys = 16 / kRows;
  const size_t left = job.key_count - key, keys = left < kKeys ? left : kKeys;
  const uint8_t* k[kKeys];
  for (size_t i = 0; i < kKeys; ++i) k[i] = job.keys + (key + (i < keys ? i : 0)) * job.key_stride;
  const float* const q = job.q_f32 + row * job.head_dim;
  __m512 sums[16];
#pragma GCC unroll 16
  for (size_t i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
  for (size_t c = 0; c < job.head_dim; c += kLanes) {
    const __mmask16 mask = c + kLanes <= job.head_dim ? 0xFFFF : kEight;
    add_products<T, kRows, kKeys>(q, job.head_dim, k, c, mask, sums);
  }
  const __m512 scores = sums_of(sums);
  const auto mask = static_cast<__mmask16>((1u << keys) - 1);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (size_t r = 0; r < kRows; ++r) {
    const auto first = static_cast<int>(r * kKeys);
    const __m512i of_row = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    _mm512_mask_storeu_ps(job.scores + (row + r) * kBlockKeys + key, mask,
                          _mm512_permutexvar_ps(of_row, scores));
  }
}

template <class T>
void score(const ScoreJob& job) {
  constexpr size_t kStep = 16;  // keys that stay in the first-level cache for all rows
  for (size_t first = 0; first < job.key_count; first += kStep) {
    prefetch_steps(job.prefetch, first, first + kStep);
    const size_t end = first + kStep < job.key_count ? first + kStep : job.key_count;
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      constexpr size_t kRows = decltype(rows)::value;
      for (size_t key = first; key < end; key += 16 / kRows) score_keys<T, kRows>(job, row, key);
    });
  }
}

// kRows rows of the accumulator, kVectors vectors of coordinates from c on; with one vector the
// last eight may be missing.
template <class T, size_t kRows, size_t kVectors>
inline void accumulate_chunk(const AccumulateJob& job, size_t row, size_t c) {
  const auto mask =
      static_cast<__mmask16>(kVectors == 1 && c + kLanes > job.head_dim ? kEight : 0xFFFF);
  __m512 acc[kRows][kVectors];
  for (auto& of_row : acc) {
    for (__m512& a : of_row) a = _mm512_setzero_ps();
  }
  const uint8_t* value = job.values + job.begin * job.value_stride + 2 * c;
  for (size_t key = job.begin; key < job.end; ++key, value += job.value_stride) {
    __m512 p[kRows];
    for (size_t r = 0; r < kRows; ++r) p[r] = _mm512_set1_ps(job.p[(row + r) * kBlockKeys + key]);
    for (size_t i = 0; i < kVectors; ++i) {
      const __m512 v = T::widen(kVectors == 1 ? _mm256_maskz_loadu_epi16(mask, value)
                                              : load_half(value + 2 * kLanes * i));
      for (size_t r = 0; r < kRows; ++r) acc[r][i] = _mm512_fmadd_ps(p[r], v, acc[r][i]);
    }
  }
  // The block is summed up before it is added: single keys would vanish beside a large sum.
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 rescale = _mm512_set1_ps(job.rescale[row + r]);
    for (size_t i = 0; i < kVectors; ++i) {
      const __m512 old = _mm512_maskz_loadu_ps(mask, place + kLanes * i);
      _mm512_mask_storeu_ps(place + kLanes * i, mask, _mm512_fmadd_ps(old, rescale, acc[r][i]));
    }
  }
}

template <class T>
void accumulate(const AccumulateJob& job) {
  for_row_groups(job.rows, [&](auto rows, size_t row) {
    constexpr size_t kRows = decltype(rows)::value;
    constexpr size_t kVectors = kRows == 4 ? 4 : 8;  // enough sums to hide the latency of the add
    size_t c = 0;
    for (; c + kVectors * kLanes <= job.head_dim; c += kVectors * kLanes) {
      if (row == 0) prefetch_steps(job.prefetch, c / 8, c / 8 + kVectors * kLanes / 8);
      accumulate_chunk<T, kRows, kVectors>(job, row, c);
    }
    for (; c < job.head_dim; c += kLanes) accumulate_chunk<T, kRows, 1>(job, row, c);
  });
}

}  // namespace

void add_avx512_attention_kernels(AttentionKernels& kernels) {
  kernels.score_f16 = score<F16>;
  kernels.accumulate_f16 = accumulate<F16>;
  kernels.score_bf16 = score<Bf16>;
  kernels.accumulate_bf16 = accumulate<Bf16>;
}

}  // namespace gyre::cpu
