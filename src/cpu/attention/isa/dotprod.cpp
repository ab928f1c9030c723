// Attention's inner loops with Armv8.2's int8 dot product, for machines without the matrix product.
// Nothing here may be instantiated elsewhere: the file is compiled with instructions other machines
// lack.
#include <arm_neon.h>

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/neon_keys.h"
#include "cpu/attention/isa/neon_values.h"
#include "cpu/attention/isa/neon_weights.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

template <uint32_t kFormat>
using Keys = KeyPair<OneByOne, kFormat>;
template <uint32_t kFormat>
using Values = ValueLoader<FourTokens, kFormat>;

inline int32x4_t both_bytes(int32x4_t upper, int32x4_t lower) {
  return vaddq_s32(vshlq_n_s32(upper, 8), lower);
}

// Products of the query's upper and of its lower bytes with one key.
struct KeySums {
  int32x4_t upper = vdupq_n_s32(0), lower = vdupq_n_s32(0);
};

// 2 * kPairs keys times kRows queries, 16 of a unit's coordinates.
template <uint32_t kFormat, size_t kRows, size_t kPairs, size_t j>
inline void multiply_keys(const typename Keys<kFormat>::Tables& tables,
                          const Keys<kFormat> (&keys)[kPairs], const int8_t* q, size_t head_dim,
                          KeySums (&sums)[kRows][2 * kPairs]) {
  int8x16_t k[kPairs][2];
  for (size_t pair = 0; pair < kPairs; ++pair) keys[pair].template levels<j>(tables, k[pair]);
  for (size_t r = 0; r < kRows; ++r) {
    const int8_t* const row = q + 2 * r * head_dim + 16 * j;
    const int8x16_t upper = vld1q_s8(row), lower = vld1q_s8(row + head_dim);
    for (size_t i = 0; i < 2 * kPairs; ++i) {
      sums[r][i].upper = vdotq_s32(sums[r][i].upper, upper, k[i / 2][i % 2]);
      sums[r][i].lower = vdotq_s32(sums[r][i].lower, lower, k[i / 2][i % 2]);
    }
  }
}

// All 64 of a unit.
template <uint32_t kFormat, size_t kRows, size_t kPairs>
inline void multiply_unit(const typename Keys<kFormat>::Tables& tables,
                          const Keys<kFormat> (&keys)[kPairs], const int8_t* q, size_t head_dim,
                          KeySums (&sums)[kRows][2 * kPairs]) {
  multiply_keys<kFormat, kRows, kPairs, 0>(tables, keys, q, head_dim, sums);
  multiply_keys<kFormat, kRows, kPairs, 1>(tables, keys, q, head_dim, sums);
  multiply_keys<kFormat, kRows, kPairs, 2>(tables, keys, q, head_dim, sums);
  multiply_keys<kFormat, kRows, kPairs, 3>(tables, keys, q, head_dim, sums);
}

// First row, first key and scale block of a product.
struct Place {
  size_t row, key, block;
};

// 2 * kPairs keys times kRows queries, over one scale block; a vector per product, still to be
// added up.
template <uint32_t kFormat, size_t kRows, size_t kPairs>
inline void multiply_block(const ScoreJob& job, const typename Keys<kFormat>::Tables& tables,
                           const Place& at, int32x4_t* products) {
  KeySums sums[kRows][2 * kPairs];
  const uint64_t stride = job.key_stride;
  const uint8_t* const keys = job.keys + at.key * stride;
  const size_t first = job.blocks->begin[at.block] / 64, units = job.blocks->size[at.block] / 64;
  for (size_t unit = first; unit < first + units; ++unit) {
    const Keys<kFormat> pair(keys, keys + stride, job.head_dim, unit);
    const int8_t* const q = job.q + 2 * at.row * job.head_dim + 64 * unit;
    if constexpr (kPairs == 1) {
      multiply_unit<kFormat, kRows, 1>(tables, {pair}, q, job.head_dim, sums);
    } else {
      const Keys<kFormat> next(keys + 2 * stride, keys + 3 * stride, job.head_dim, unit);
      multiply_unit<kFormat, kRows, 2>(tables, {pair, next}, q, job.head_dim, sums);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kPairs; ++i)
      products[4 * r + i] = both_bytes(sums[r][i].upper, sums[r][i].lower);
  }
}

template <uint32_t kFormat, size_t kRows>
inline void score_keys(const ScoreJob& job, const typename Keys<kFormat>::Tables& tables,
                       size_t row, size_t key) {
  constexpr size_t kPairs = kRows <= 2 ? 2 : 1;  // as many sums as registers hold
  const uint8_t* const scales = job.scales + key / kTile * job.scales_stride + key % kTile * 2;
  float32x4_t score[kRows];
  for (size_t r = 0; r < kRows; ++r) score[r] = vdupq_n_f32(0);
  for (size_t b = 0; b < job.blocks->count; ++b) {
    int32x4_t products[kRows][4];
    for (size_t i = 0; i < 4; i += 2 * kPairs)
      multiply_block<kFormat, kRows, kPairs>(job, tables, {row, key + i, b}, products[0] + i);
    const float32x4_t scale = key_scales(scales + b * kTile * 2);
    for (size_t r = 0; r < kRows; ++r) {
      const int32x4_t sum = vpaddq_s32(vpaddq_s32(products[r][0], products[r][1]),
                                       vpaddq_s32(products[r][2], products[r][3]));
      score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(sum), scale);
    }
  }
  for (size_t r = 0; r < kRows; ++r) vst1q_f32(job.scores + (row + r) * kBlockKeys + key, score[r]);
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  const typename Keys<kFormat>::Tables tables;
  for (size_t key = 0; key < job.key_count; key += 4) {
    if (row == 0) fetch(job.prefetch, key, key + 4);
    score_keys<kFormat, kRows>(job, tables, row, key);
  }
}

template <uint32_t kFormat>
void score_format(const ScoreJob& job) {
  for_row_groups(job.rows, [&](auto rows, size_t row) {
    score_rows<kFormat, decltype(rows)::value>(job, row);
  });
}

void score_levels(const ScoreJob& job) {
  with_native_format(job.format, [&](auto format) { score_format<decltype(format)::value>(job); });
}

// Products of a row's upper and lower bytes with four coordinates of kUnits * 8.
template <size_t kUnits>
struct ValueSums {
  int32x4_t upper[2 * kUnits], lower[2 * kUnits];
  ValueSums() {
    for (size_t i = 0; i < 2 * kUnits; ++i) upper[i] = lower[i] = vdupq_n_s32(0);
  }
  void add(int8x16_t p, size_t unit, const int8x16_t (&v)[4]) {
    for (size_t half = 0; half < 2; ++half) {
      int32x4_t& up = upper[2 * unit + half];
      int32x4_t& low = lower[2 * unit + half];
      up = vdotq_laneq_s32(up, v[2 * half], p, 0);
      low = vdotq_laneq_s32(low, v[2 * half], p, 2);
      up = vdotq_laneq_s32(up, v[2 * half + 1], p, 1);
      low = vdotq_laneq_s32(low, v[2 * half + 1], p, 3);
    }
  }
};

struct Products {
  using Bytes = SignedBytes;
  template <uint32_t kFormat>
  using Loader = Values<kFormat>;
  template <uint32_t kFormat, size_t kRows, size_t kUnits>
  static void accumulate(const AccumulateJob& job, const Values<kFormat>& loader,
                         const Weights& weights, size_t row, size_t c);
};

// acc = acc * keep + sums, for kRows rows and kUnits * 8 coordinates.
template <uint32_t kFormat, size_t kRows, size_t kUnits>
inline void Products::accumulate(const AccumulateJob& job, const Values<kFormat>& loader,
                                 const Weights& weights, size_t row, size_t c) {
  ValueSums<kUnits> sums[kRows];
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    for (size_t unit = 0; unit < kUnits; ++unit) {
      int8x16_t v[4];
      loader.load(job.values + tile * job.value_stride, job.head_dim, c + 8 * unit, v);
      for (size_t r = 0; r < kRows; ++r)
        sums[r].add(vreinterpretq_s8_u8(vld1q_u8(weights.bytes[row + r][tile])), unit, v);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const float keep = job.rescale[row + r], unit = weights.unit[row + r];
    for (size_t i = 0; i < 2 * kUnits; ++i) {
      // Eight bits are behind the point.
      const float32x4_t sum = vcvtq_n_f32_s32(both_bytes(sums[r].upper[i], sums[r].lower[i]), 8);
      const float32x4_t old = vld1q_f32(place + 4 * i);
      vst1q_f32(place + 4 * i, vfmaq_n_f32(keep == 1 ? old : vmulq_n_f32(old, keep), sum, unit));
    }
  }
}

void accumulate_levels(const AccumulateJob& job) {
  with_native_format(
      job.format, [&](auto format) { accumulate_blocks<Products, decltype(format)::value>(job); });
}

}  // namespace

AttentionKernels dotprod_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "dotprod";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.query_layout = QueryLayout::hi_then_lo;
  return kernels;
}

}  // namespace gyre::cpu
