#pragma once
// Decode attention's inner loops over levels with AVX-512's dot product of unsigned with signed
// bytes, for the files that compile them for more or fewer of AVX-512's extensions. All of it
// anonymous, so that each has its own copy.

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/key_products_avx512.h"
#include "cpu/attention/isa/unpack_v_avx512.h"
#include "cpu/attention/isa/value_pairs_avx512.h"
#include "cpu/attention/isa/weights_avx512.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

inline __m512i four_tokens(const uint8_t* bytes) {
  int32_t word = 0;
  __builtin_memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// The sum of a row's weights.
inline int32_t sum_of_weights(const uint8_t (&bytes)[2][kBlockKeys]) {
  __m512i hi = _mm512_setzero_si512(), lo = hi;
  add_products(hi, _mm512_load_si512(bytes[0]), _mm512_set1_epi8(1));
  add_products(lo, _mm512_load_si512(bytes[1]), _mm512_set1_epi8(1));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo));
}

// Integer sums of kRows rows and kChunks * 16 coordinates, hi and lo.
template <size_t kRows, size_t kChunks>
struct ValueSums {
  __m512i at[kRows][2][kChunks];

  ValueSums() {
    for (auto& of_row : at) {
      for (auto& of_plane : of_row) {
        for (__m512i& sum : of_plane) sum = _mm512_setzero_si512();
      }
    }
  }
  // Adds four tokens' products, whose weights are at byte `token` of each row's.
  void add(const Weights& weights, size_t row, size_t token, const Operands<kChunks>& v) {
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t plane = 0; plane < 2; ++plane) {
        const __m512i p = four_tokens(weights.bytes[row + r][plane] + token);
        for (size_t i = 0; i < kChunks; ++i) add_products(at[r][plane][i], p, v.at[i]);
      }
    }
  }
  // acc = acc * rescale + sums, with one chunk of its first `coordinates`.
  template <uint32_t kFormat>
  void store(const AccumulateJob& job, const Weights& weights, const int32_t* sums, size_t row,
             size_t c, size_t coordinates) const {
    const auto mask = static_cast<__mmask16>(kChunks == 1 ? (1u << coordinates) - 1 : 0xFFFFu);
#pragma GCC unroll 4  // or g++ 12 keeps the sums in memory
    for (size_t r = 0; r < kRows; ++r) {
      float* const place = job.acc + (row + r) * job.head_dim + c;
      const __m512 rescale = _mm512_set1_ps(job.rescale[row + r]);
      const __m512 step = _mm512_set1_ps(weights.step[row + r]);
      const __m512i bias =
          _mm512_set1_epi32(kLinearCodes<kFormat> ? kValueBias<kFormat> * sums[row + r] : 0);
      for (size_t i = 0; i < kChunks; ++i) {
        __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(at[r][0][i], 8), at[r][1][i]);
        if constexpr (kLinearCodes<kFormat>)
          whole = _mm512_sub_epi32(_mm512_slli_epi32(whole, 1), bias);
        const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, place + 16 * i), rescale);
        // The step is worth 256: eight bits are behind the point.
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(0x1p-8f));
        _mm512_mask_storeu_ps(place + 16 * i, mask, _mm512_fmadd_ps(sum, step, old));
      }
    }
  }
};

// kRows rows and kChunks * 16 coordinates; with one chunk the last of them may be missing.
template <uint32_t kFormat, size_t kRows, size_t kChunks>
inline void accumulate_chunk(const AccumulateJob& job, const Weights& weights, const int32_t* sums,
                             size_t row, size_t c, size_t coordinates) {
  ValueSums<kRows, kChunks> acc;
  for (size_t tile = 0; tile < job.tiles; tile += kInPairs<kFormat> ? 2 : 1) {
    const uint8_t* const at = job.values + tile * job.value_stride;
    if constexpr (kInPairs<kFormat>) {
      const uint8_t* const second = tile + 1 < job.tiles ? at + job.value_stride : at;
      const ValuePairs<kFormat, kChunks> pairs(at, second, job.head_dim, c, coordinates);
      acc.add(weights, row, tile * kTile, pairs.template levels<0>());
      acc.add(weights, row, tile * kTile + 4, pairs.template levels<1>());
      acc.add(weights, row, tile * kTile + 8, pairs.template levels<2>());
      acc.add(weights, row, tile * kTile + 12, pairs.template levels<3>());
    } else {
      __m512i unpacked[kChunks][2];
      Operands<kChunks> v;
      unpack_v_operands<kFormat, kChunks>(at, job.head_dim, c, coordinates, unpacked);
      for (size_t half = 0; half < 2; ++half) {
        for (size_t i = 0; i < kChunks; ++i) v.at[i] = unpacked[i][half];
        acc.add(weights, row, tile * kTile + 4 * half, v);
      }
    }
  }
  acc.template store<kFormat>(job, weights, sums, row, c, coordinates);
}

template <uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, const int32_t* sums,
                     size_t row, size_t block) {
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 32 <= end; c += 32) {
    if (row == 0) prefetch_steps(job.prefetch, c / 8, c / 8 + 4);
    accumulate_chunk<kFormat, kRows, 2>(job, weights, sums, row, c, 32);
  }
  for (; c < end; c += 16)
    accumulate_chunk<kFormat, kRows, 1>(job, weights, sums, row, c, end - c < 16 ? end - c : 16);
}

template <uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  Weights weights;
  int32_t sums[kTileRows];  // of weights, if codes have a bias
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const BlockScales scales(job, block);
    store_weights(job, scales, weights);
    if constexpr (kInPairs<kFormat>) {
      for (size_t row = 0; row < job.rows; ++row) {
        for (uint8_t(&plane)[kBlockKeys] : weights.bytes[row]) pair_weights(plane);
      }
    }
    if constexpr (kLinearCodes<kFormat>) {
      for (size_t row = 0; row < job.rows; ++row) sums[row] = sum_of_weights(weights.bytes[row]);
    }
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      accumulate_rows<kFormat, decltype(rows)::value>(job, weights, sums, row, block);
    });
  }
}

void score_levels(const ScoreJob& job) {
  with_native_format(job.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::value;
    const QuadTables& tables =
        find_quad_tables<kFormat>(job.key_dim == 0 ? job.head_dim : job.key_dim);
    const bool near = near_rows(tables, job.key_stride);
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      constexpr size_t kRows = decltype(rows)::value;
      constexpr bool kMayBeNear = abi::kv_bits(kFormat) <= 6;  // at head dims that are in use
      if (kMayBeNear && near) return score_rows<kFormat, kRows, kMayBeNear>(job, tables, row);
      score_rows<kFormat, kRows, false>(job, tables, row);
    });
  });
}

void accumulate_levels(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<decltype(format)::value>(job); });
}

AttentionKernels dot_kernels(const char* name) {
  AttentionKernels kernels;
  kernels.name = name;
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.query_layout = QueryLayout::hi_then_lo;
  kernels.byte_step = 16;
  kernels.nibble_step = 32;
  kernels.odd_keys = true;
  return kernels;
}

}  // namespace
}  // namespace gyre::cpu
