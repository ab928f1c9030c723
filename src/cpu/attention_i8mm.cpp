// Attention's inner loops with Armv8.6's int8 matrix product and f16 widening product. Nothing here
// may be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <arm_neon.h>

#include <cstddef>

#include "cpu/attention_i8mm_keys.h"
#include "cpu/attention_i8mm_values.h"
#include "cpu/attention_kernels.h"
#include "cpu/native_format.h"

namespace gyre::cpu {
namespace {

constexpr size_t kTile = abi::kKvTile;

// Into the second cache: the first is full of what is worked on.
inline void fetch(const Ahead& ahead, size_t begin, size_t end) {
  const uint8_t* const last = ahead.at + end * ahead.bytes_per_unit;
  for (const uint8_t* at = ahead.at + begin * ahead.bytes_per_unit; at < last; at += 64)
    __builtin_prefetch(at, 0, 2);
}

// Four keys times kRows queries, 16 of a unit's coordinates: acc[row][pair of keys] holds
// {upper x key 0, upper x key 1, lower x key 0, lower x key 1}.
template <uint32_t kFormat, size_t kRows, size_t j>
inline void multiply_keys(const typename KeyPair<kFormat>::Tables& t,
                          const KeyPair<kFormat> (&keys)[2], const int8_t* q, uint64_t q_stride,
                          int32x4_t (&acc)[kRows][2]) {
  int8x16_t k[2][2];
  for (size_t pair = 0; pair < 2; ++pair) keys[pair].template levels<j>(t, k[pair]);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t half = 0; half < 2; ++half) {
      const int8x16_t query = vld1q_s8(q + r * q_stride + (2 * j + half) * 16);
      for (size_t pair = 0; pair < 2; ++pair)
        acc[r][pair] = vmmlaq_s32(acc[r][pair], query, k[pair][half]);
    }
  }
}

inline float32x4_t key_scales(const uint8_t* scales) {
  const uint16x4_t stored = vreinterpret_u16_u8(vld1_u8(scales));
  return vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(stored, 15)), 0x1p-31f);
}

// 256 times the products of the upper bytes, which come first, plus those of the lower bytes.
inline int32x4_t both_bytes(int32x4_t first, int32x4_t second) {
  const int64x2_t a = vreinterpretq_s64_s32(first), b = vreinterpretq_s64_s32(second);
  const int32x4_t upper = vreinterpretq_s32_s64(vtrn1q_s64(a, b));
  const int32x4_t lower = vreinterpretq_s32_s64(vtrn2q_s64(a, b));
  return vaddq_s32(vshlq_n_s32(upper, 8), lower);
}

template <uint32_t kFormat, size_t kRows>
inline void score_keys(const ScoreJob& job, const typename KeyPair<kFormat>::Tables& tables,
                       size_t row, size_t key) {
  const uint64_t q_stride = uint64_t{2} * job.head_dim, stride = job.key_stride;
  const int8_t* const q = job.q + row * q_stride;
  const uint8_t* const keys = job.keys + key * stride;
  const uint8_t* const scales = job.scales + key / kTile * job.scales_stride + key % kTile * 2;
  float32x4_t score[kRows];
  for (size_t r = 0; r < kRows; ++r) score[r] = vdupq_n_f32(0);
  for (size_t b = 0; b < job.blocks->count; ++b) {
    int32x4_t acc[kRows][2];
    for (size_t r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = vdupq_n_s32(0);
    const size_t first = job.blocks->begin[b] / 64, units = job.blocks->size[b] / 64;
    for (size_t unit = first; unit < first + units; ++unit) {
      const KeyPair<kFormat> loaded[2] = {
          {keys, keys + stride, job.head_dim, unit},
          {keys + 2 * stride, keys + 3 * stride, job.head_dim, unit}};
      const int8_t* const at = q + uint64_t{128} * unit;
      multiply_keys<kFormat, kRows, 0>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kRows, 1>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kRows, 2>(tables, loaded, at, q_stride, acc);
      multiply_keys<kFormat, kRows, 3>(tables, loaded, at, q_stride, acc);
    }
    const float32x4_t scale = key_scales(scales + b * kTile * 2);
    for (size_t r = 0; r < kRows; ++r)
      score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(both_bytes(acc[r][0], acc[r][1])), scale);
  }
  for (size_t r = 0; r < kRows; ++r)
    vst1q_f32(job.scores + (row + r) * kAttentionBlock + key, score[r]);
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  const typename KeyPair<kFormat>::Tables tables;
  for (size_t key = 0; key < job.key_count; key += 4) {
    if (row == 0) fetch(job.ahead, key, key + 4);
    score_keys<kFormat, kRows>(job, tables, row, key);
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

constexpr float kHuge = 1e38f, kTiny = 0x1p-90f;

// Probabilities of a block times the values' scales, in 16 bits against the largest of the row: for
// each tile the upper bytes of its tokens, then the lower bytes.
struct Weights {
  using OfRow = uint8_t[kAttentionBlock / kTile][2 * kTile];
  alignas(16) OfRow bytes[kAttentionRows];
  float unit[kAttentionRows];
};

// A key that is not seen must not bring in its scale, which may be NaN. Returns the largest
// product.
float weigh_with_care(const float* p, const float* scales, uint32_t vectors,
                      float32x4_t* weighted) {
  float32x4_t largest = vdupq_n_f32(0);
  for (size_t i = 0; i < vectors; ++i) {
    const float32x4_t probability = vld1q_f32(p + 4 * i);
    const uint32x4_t unseen = vceqzq_f32(probability);
    const float32x4_t product = vmulq_f32(probability, vld1q_f32(scales + 4 * i));
    weighted[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), unseen));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  return vmaxvq_f32(largest);
}

void weigh_row(const AccumulateJob& job, const float* scales, size_t row, Weights& out) {
  const float* const p = job.p + row * kAttentionBlock;
  float32x4_t weighted[kAttentionBlock / 4];
  float32x4_t largest = vdupq_n_f32(0);
  const uint32_t vectors = job.tiles * 2;
  for (size_t i = 0; i < vectors; ++i) {
    weighted[i] = vmulq_f32(vld1q_f32(p + 4 * i), vld1q_f32(scales + 4 * i));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  float top = vmaxvq_f32(largest);
  if (!(top < kHuge)) top = weigh_with_care(p, scales, vectors, weighted);
  constexpr float kMost = 65535.0f / 256.0f;
  out.unit[row] = top / kMost;
  float inverse = top > 0 ? 65535.0f / top : 0.0f;
  if (top < kTiny) {  // the inverse would overflow: take it in two steps
    for (size_t i = 0; i < vectors; ++i) weighted[i] = vmulq_n_f32(weighted[i], 0x1p60f);
    inverse = top > 0 ? 65535.0f / (top * 0x1p60f) : 0.0f;
  }
  for (size_t t = 0; t < job.tiles; ++t) {
    const uint32x4_t a = vcvtnq_u32_f32(vmulq_n_f32(weighted[2 * t], inverse));
    const uint32x4_t b = vcvtnq_u32_f32(vmulq_n_f32(weighted[2 * t + 1], inverse));
    const uint8x16_t w = vreinterpretq_u8_u16(vcombine_u16(vqmovn_u32(a), vqmovn_u32(b)));
    vst1q_u8(out.bytes[row][t],
             vcombine_u8(vget_low_u8(vuzp2q_u8(w, w)), vget_low_u8(vuzp1q_u8(w, w))));
  }
}

// Sums of kUnits * 8 coordinates from c on, over all tiles: acc[row][pair of coordinates] holds
// {upper x c, upper x c + 1, lower x c, lower x c + 1}.
template <uint32_t kFormat, size_t kRows, size_t kUnits>
inline void multiply_values(const AccumulateJob& job, const ValueLoader<kFormat>& loader,
                            const Weights::OfRow* weights, size_t c,
                            int32x4_t (&acc)[kRows][kUnits * 4]) {
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t j = 0; j < kUnits * 4; ++j) acc[r][j] = vdupq_n_s32(0);
  }
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    uint8x16_t p[kRows];
    for (size_t r = 0; r < kRows; ++r) p[r] = vld1q_u8(weights[r][tile]);
    for (size_t unit = 0; unit < kUnits; ++unit) {
      int8x16_t v[4];
      loader.load(job.values + tile * job.value_stride, job.head_dim, c + 8 * unit, v);
      for (size_t j = 0; j < 4; ++j) {
        for (size_t r = 0; r < kRows; ++r)
          acc[r][unit * 4 + j] = vusmmlaq_s32(acc[r][unit * 4 + j], p[r], v[j]);
      }
    }
  }
}

// acc = acc * keep + sums, for kRows rows and kUnits * 8 coordinates.
template <uint32_t kFormat, size_t kRows, size_t kUnits>
inline void accumulate_chunk(const AccumulateJob& job, const ValueLoader<kFormat>& loader,
                             const Weights& weights, size_t row, size_t c) {
  int32x4_t acc[kRows][kUnits * 4];
  multiply_values<kFormat, kRows, kUnits>(job, loader, weights.bytes + row, c, acc);
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const float keep = job.keep[row + r], unit = weights.unit[row + r];
    for (size_t j = 0; j < kUnits * 2; ++j) {
      // Eight bits are behind the point.
      const float32x4_t sum = vcvtq_n_f32_s32(both_bytes(acc[r][2 * j], acc[r][2 * j + 1]), 8);
      const float32x4_t old = vld1q_f32(place + 4 * j);
      vst1q_f32(place + 4 * j, vfmaq_n_f32(keep == 1 ? old : vmulq_n_f32(old, keep), sum, unit));
    }
  }
}

template <uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row, size_t block) {
  constexpr size_t kUnits = kRows <= 2 ? 2 : 1;
  const ValueLoader<kFormat> loader;
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 8 * kUnits <= end; c += 8 * kUnits) {
    if (row == 0) fetch(job.ahead, c / 8, c / 8 + kUnits);
    accumulate_chunk<kFormat, kRows, kUnits>(job, loader, weights, row, c);
  }
  if (c < end) accumulate_chunk<kFormat, kRows, 1>(job, loader, weights, row, c);
}

template <uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    float scales[kAttentionBlock];
    for (size_t tile = 0; tile < job.tiles; ++tile) {
      const uint8_t* const stored = job.scales + tile * job.scales_stride + block * kTile * 2;
      vst1q_f32(scales + tile * kTile, key_scales(stored));
      vst1q_f32(scales + tile * kTile + 4, key_scales(stored + 8));
    }
    for (size_t row = 0; row < job.rows; ++row) weigh_row(job, scales, row, weights);
    size_t row = 0;
    for (; row + 4 <= job.rows; row += 4) accumulate_rows<kFormat, 4>(job, weights, row, block);
    for (; row + 2 <= job.rows; row += 2) accumulate_rows<kFormat, 2>(job, weights, row, block);
    if (row < job.rows) accumulate_rows<kFormat, 1>(job, weights, row, block);
  }
}

void accumulate_levels(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<decltype(format)::value>(job); });
}

// Four keys in f16 times kRows queries in f32, all in f32: widening a key is shared by the rows,
// and a query rounded to f16 would show.
struct ScoreSums {
  float32x4_t key[4];
  void clear() { key[0] = key[1] = key[2] = key[3] = vdupq_n_f32(0); }
  void add(float32x4_t query, const float32x4_t (&wide)[4]) {
    key[0] = vfmaq_f32(key[0], query, wide[0]);
    key[1] = vfmaq_f32(key[1], query, wide[1]);
    key[2] = vfmaq_f32(key[2], query, wide[2]);
    key[3] = vfmaq_f32(key[3], query, wide[3]);
  }
  float32x4_t of_keys() const {
    return vpaddq_f32(vpaddq_f32(key[0], key[1]), vpaddq_f32(key[2], key[3]));
  }
};

template <size_t kRows>
void score_f16_rows(const ScoreJob& job, size_t row, size_t key, size_t keys) {
  const float* q = job.q_plain + row * job.head_dim;
  const float16_t* k[4];
  for (size_t i = 0; i < 4; ++i) {
    const size_t at = key + (i < keys ? i : 0);  // a key that is not there is replaced, not read
    k[i] = reinterpret_cast<const float16_t*>(job.keys + at * job.key_stride);
  }
  // One row alone keeps its even and odd halves apart: more sums, not to wait for each other.
  constexpr size_t kSums = kRows == 1 ? 2 : kRows;
  ScoreSums sums[kSums];
#pragma GCC unroll 4
  for (size_t r = 0; r < kSums; ++r) sums[r].clear();
  for (size_t c = 0; c < job.head_dim; c += 8, q += 8) {
    const float16x8_t k0 = vld1q_f16(k[0] + c), k1 = vld1q_f16(k[1] + c), k2 = vld1q_f16(k[2] + c),
                      k3 = vld1q_f16(k[3] + c);
    const float32x4_t low[4] = {vcvt_f32_f16(vget_low_f16(k0)), vcvt_f32_f16(vget_low_f16(k1)),
                                vcvt_f32_f16(vget_low_f16(k2)), vcvt_f32_f16(vget_low_f16(k3))};
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) sums[r].add(vld1q_f32(q + r * job.head_dim), low);
    const float32x4_t high[4] = {vcvt_high_f32_f16(k0), vcvt_high_f32_f16(k1),
                                 vcvt_high_f32_f16(k2), vcvt_high_f32_f16(k3)};
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r)
      sums[kRows == 1 ? 1 : r].add(vld1q_f32(q + r * job.head_dim + 4), high);
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    float32x4_t scores = sums[r].of_keys();
    if constexpr (kRows == 1) scores = vaddq_f32(scores, sums[1].of_keys());
    float lanes[4];
    vst1q_f32(lanes, scores);
    for (size_t i = 0; i < keys; ++i) job.scores[(row + r) * kAttentionBlock + key + i] = lanes[i];
  }
}

void score_f16(const ScoreJob& job) {
  const size_t keys = job.key_count;
  for (size_t key = 0; key < keys; key += 4) {
    fetch(job.ahead, key, key + 4);
    const size_t count = keys - key < 4 ? keys - key : 4;
    size_t row = 0;
    for (; row + 4 <= job.rows; row += 4) score_f16_rows<4>(job, row, key, count);
    for (; row + 2 <= job.rows; row += 2) score_f16_rows<2>(job, row, key, count);
    if (row < job.rows) score_f16_rows<1>(job, row, key, count);
  }
}

// One value row times one probability of each row.
template <int kLane, size_t kRows, size_t kVectors>
inline void add_value(const uint8_t* value, const float16x8_t (&p)[kRows],
                      float32x4_t (&acc)[kRows][2 * kVectors]) {
  for (size_t i = 0; i < kVectors; ++i) {
    const float16x8_t v = vld1q_f16(reinterpret_cast<const float16_t*>(value) + 8 * i);
    for (size_t r = 0; r < kRows; ++r) {
      acc[r][2 * i] = vfmlalq_laneq_low_f16(acc[r][2 * i], v, p[r], kLane);
      acc[r][2 * i + 1] = vfmlalq_laneq_high_f16(acc[r][2 * i + 1], v, p[r], kLane);
    }
  }
}

// Probabilities of a block in f16, brought near 1.
struct HalfProbabilities {
  alignas(16) float16_t p[kAttentionRows][kAttentionBlock];
  float unit[kAttentionRows];
  bool wide[kAttentionRows];  // reach too far for f16: the small ones would be lost

  explicit HalfProbabilities(const AccumulateJob& job) {
    for (size_t r = 0; r < job.rows; ++r) fill(job, r);
  }
  void fill(const AccumulateJob& job, size_t r) {
    const float* const from = job.p + r * kAttentionBlock;
    const size_t first = size_t{job.begin} / 4 * 4;
    float32x4_t top = vdupq_n_f32(0), bottom = vdupq_n_f32(1);
    for (size_t i = first; i < job.end; i += 4) {
      const float32x4_t x = vld1q_f32(from + i);
      top = vmaxq_f32(top, x);
      bottom = vminq_f32(bottom, vbslq_f32(vceqzq_f32(x), vdupq_n_f32(1), x));  // 0: not seen
    }
    unit[r] = vmaxvq_f32(top);
    wide[r] = !(vminvq_f32(bottom) >= 0x1p-14f * unit[r]) || !(unit[r] > 0x1p-100f);
    if (wide[r]) return;
    const float inverse = 1.0f / unit[r];
    for (size_t i = first; i < job.end; i += 4)
      vst1_f16(p[r] + i, vcvt_f16_f32(vmulq_n_f32(vld1q_f32(from + i), inverse)));
  }
};

template <size_t kRows, size_t kVectors>
inline void accumulate_f16_chunk(const AccumulateJob& job, const HalfProbabilities& half,
                                 size_t row, size_t c) {
  float32x4_t acc[kRows][2 * kVectors];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kVectors; ++i) acc[r][i] = vdupq_n_f32(0);
  }
  const uint64_t stride = job.value_stride;
  const uint8_t* value = job.values + job.begin * stride + c * sizeof(float16_t);
  size_t key = job.begin;
  const auto one = [&] {
    float16x8_t weights[kRows];
    for (size_t r = 0; r < kRows; ++r) weights[r] = vdupq_n_f16(half.p[row + r][key]);
    add_value<0, kRows, kVectors>(value, weights, acc);
    ++key, value += stride;
  };
  while (key < job.end && key % 8 != 0) one();
  for (; key + 8 <= job.end; key += 8, value += 8 * stride) {
    float16x8_t weights[kRows];
    for (size_t r = 0; r < kRows; ++r) weights[r] = vld1q_f16(half.p[row + r] + key);
    add_value<0, kRows, kVectors>(value, weights, acc);
    add_value<1, kRows, kVectors>(value + stride, weights, acc);
    add_value<2, kRows, kVectors>(value + 2 * stride, weights, acc);
    add_value<3, kRows, kVectors>(value + 3 * stride, weights, acc);
    add_value<4, kRows, kVectors>(value + 4 * stride, weights, acc);
    add_value<5, kRows, kVectors>(value + 5 * stride, weights, acc);
    add_value<6, kRows, kVectors>(value + 6 * stride, weights, acc);
    add_value<7, kRows, kVectors>(value + 7 * stride, weights, acc);
  }
  while (key < job.end) one();
  // A block's sum joins the rest as a whole: single keys would vanish beside a large sum.
  float* const place = job.acc + row * job.head_dim + c;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kVectors; ++i) {
      float* const at = place + r * job.head_dim + 4 * i;
      const float32x4_t old = vmulq_n_f32(vld1q_f32(at), job.keep[row + r]);
      vst1q_f32(at, vfmaq_n_f32(old, acc[r][i], half.unit[row + r]));
    }
  }
}

template <size_t kRows>
void accumulate_f16_rows(const AccumulateJob& job, const HalfProbabilities& half, size_t row) {
  constexpr size_t kVectors = kRows == 1 ? 8 : 2;  // enough sums not to wait for each other
  size_t c = 0;
  for (; c + 8 * kVectors <= job.head_dim; c += 8 * kVectors) {
    if (row == 0) fetch(job.ahead, c / 8, c / 8 + kVectors);
    accumulate_f16_chunk<kRows, kVectors>(job, half, row, c);
  }
  for (; c < job.head_dim; c += 8) accumulate_f16_chunk<kRows, 1>(job, half, row, c);
}

// A row whose probabilities f16 cannot hold, in f32.
void accumulate_f16_wide(const AccumulateJob& job, size_t row) {
  const float* const p = job.p + row * kAttentionBlock;
  float* const place = job.acc + row * job.head_dim;
  for (size_t c = 0; c < job.head_dim; c += 8) {
    float32x4_t low = vdupq_n_f32(0), high = vdupq_n_f32(0);
    for (size_t key = job.begin; key < job.end; ++key) {
      const auto* const values =
          reinterpret_cast<const float16_t*>(job.values + key * job.value_stride);
      const float16x8_t v = vld1q_f16(values + c);
      low = vfmaq_n_f32(low, vcvt_f32_f16(vget_low_f16(v)), p[key]);
      high = vfmaq_n_f32(high, vcvt_high_f32_f16(v), p[key]);
    }
    vst1q_f32(place + c, vaddq_f32(vmulq_n_f32(vld1q_f32(place + c), job.keep[row]), low));
    vst1q_f32(place + c + 4, vaddq_f32(vmulq_n_f32(vld1q_f32(place + c + 4), job.keep[row]), high));
  }
}

void accumulate_f16(const AccumulateJob& job) {
  const HalfProbabilities half(job);
  for (size_t row = 0; row < job.rows;) {
    size_t together = 0;  // rows that f16 can hold
    while (together < 4 && row + together < job.rows && !half.wide[row + together]) ++together;
    if (together == 0) accumulate_f16_wide(job, row++);
    if (together == 4) accumulate_f16_rows<4>(job, half, row), row += 4;
    if (together == 2 || together == 3) accumulate_f16_rows<2>(job, half, row), row += 2;
    if (together == 1) accumulate_f16_rows<1>(job, half, row), row += 1;
  }
}

}  // namespace

AttentionKernels i8mm_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "i8mm";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.score_f16 = score_f16;
  kernels.accumulate_f16 = accumulate_f16;
  return kernels;
}

}  // namespace gyre::cpu
