// Decode attention's inner loops over levels with Armv8.6's int8 MMA. Nothing here may be
// instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <arm_neon.h>

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/unpacked_neon.h"
#include "cpu/attention/isa/weights_neon.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

template <uint32_t kFormat>
using Keys = typename KeysOf<Interleaved, kFormat>::Pair;

// Multiplies four keys with kRows queries over 16 coordinates of a chunk: acc[row][pair of keys]
// holds {hi x key 0, hi x key 1, lo x key 0, lo x key 1}.
template <size_t j, class Tables, class Pair, size_t kRows>
inline void multiply_keys(const Tables& t, const Pair (&keys)[2], const int8_t* q,
                          uint64_t q_stride, int32x4_t (&acc)[kRows][2]) {
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

// 256 times the sums over hi, which come first, plus those over lo.
inline int32x4_t join_hi_lo(int32x4_t first, int32x4_t second) {
  const int64x2_t a = vreinterpretq_s64_s32(first), b = vreinterpretq_s64_s32(second);
  const int32x4_t hi = vreinterpretq_s32_s64(vtrn1q_s64(a, b));
  const int32x4_t lo = vreinterpretq_s32_s64(vtrn2q_s64(a, b));
  return vaddq_s32(vshlq_n_s32(hi, 8), lo);
}

template <uint32_t kFormat, size_t kRows>
inline void score_keys(const ScoreJob& job, const typename Keys<kFormat>::Tables& tables,
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
    size_t c = job.blocks->begin[b];
    const size_t end = c + job.blocks->size[b];
    for (; c + 64 <= end; c += 64) {
      const Keys<kFormat> loaded[2] = {
          load_pair<Keys<kFormat>, kFormat>(keys, stride, job.head_dim, c),
          load_pair<Keys<kFormat>, kFormat>(keys + 2 * stride, stride, job.head_dim, c)};
      const int8_t* const at = q + 2 * c;
      multiply_keys<0>(tables, loaded, at, q_stride, acc);
      multiply_keys<1>(tables, loaded, at, q_stride, acc);
      multiply_keys<2>(tables, loaded, at, q_stride, acc);
      multiply_keys<3>(tables, loaded, at, q_stride, acc);
    }
    if constexpr (kBySixteen<kFormat>) {
      for (; c < end; c += 16) {
        const decltype(load_sixteen<Interleaved, kFormat>(keys, 0, 0, 0)) loaded[2] = {
            load_sixteen<Interleaved, kFormat>(keys, stride, job.head_dim, c),
            load_sixteen<Interleaved, kFormat>(keys + 2 * stride, stride, job.head_dim, c)};
        multiply_keys<0>(tables, loaded, q + 2 * c, q_stride, acc);
      }
    }
    const float32x4_t scale = key_scales(scales + b * kTile * 2);
    for (size_t r = 0; r < kRows; ++r)
      score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(join_hi_lo(acc[r][0], acc[r][1])), scale);
  }
  for (size_t r = 0; r < kRows; ++r) vst1q_f32(job.scores + (row + r) * kBlockKeys + key, score[r]);
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  const typename Keys<kFormat>::Tables tables;
  for (size_t key = 0; key < job.key_count; key += 4) {
    if (row == 0) prefetch_steps(job.prefetch, key, key + 4);
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
  with_native_format(job.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::value;
    if (!unpacks_once<kFormat>(job.rows)) return score_format<kFormat>(job);
    score_format<kUnpacked>(with_unpacked_keys<Interleaved, kFormat>(job));
  });
}

// Sums kOctets * 8 coordinates from c on over all tiles: acc[row][pair of coordinates] holds
// {hi x c, hi x c + 1, lo x c, lo x c + 1}.
template <uint32_t kFormat, size_t kRows, size_t kOctets>
inline void multiply_values(const AccumulateJob& job,
                            const typename ValuesOf<EightTokens, kFormat>::Tile& unpack,
                            const Weights::Row* weights, size_t c,
                            int32x4_t (&acc)[kRows][kOctets * 4]) {
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t j = 0; j < kOctets * 4; ++j) acc[r][j] = vdupq_n_s32(0);
  }
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    uint8x16_t p[kRows];
    for (size_t r = 0; r < kRows; ++r) p[r] = vld1q_u8(weights[r][tile]);
    for (size_t octet = 0; octet < kOctets; ++octet) {
      int8x16_t v[4];
      unpack.load(job.values + tile * job.value_stride, job.head_dim, c + 8 * octet, v);
      for (size_t j = 0; j < 4; ++j) {
        for (size_t r = 0; r < kRows; ++r)
          acc[r][octet * 4 + j] = vusmmlaq_s32(acc[r][octet * 4 + j], p[r], v[j]);
      }
    }
  }
}

struct Kernel {
  using Bytes = UnsignedBytes;
  using Order = EightTokens;
  template <uint32_t kFormat>
  using Values = typename ValuesOf<Order, kFormat>::Tile;
  template <uint32_t kFormat, size_t kRows, size_t kOctets>
  static void accumulate(const AccumulateJob& job, const Values<kFormat>& unpack,
                         const Weights& weights, size_t row, size_t c);
};

// acc = acc * rescale + sums, for kRows rows and kOctets * 8 coordinates.
template <uint32_t kFormat, size_t kRows, size_t kOctets>
inline void Kernel::accumulate(const AccumulateJob& job, const Values<kFormat>& unpack,
                               const Weights& weights, size_t row, size_t c) {
  int32x4_t acc[kRows][kOctets * 4];
  multiply_values<kFormat, kRows, kOctets>(job, unpack, weights.bytes + row, c, acc);
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const float rescale = job.rescale[row + r], step = weights.step[row + r];
    for (size_t j = 0; j < kOctets * 2; ++j) {
      // The step is worth 256: eight bits are behind the point.
      const float32x4_t sum = vcvtq_n_f32_s32(join_hi_lo(acc[r][2 * j], acc[r][2 * j + 1]), 8);
      const float32x4_t old = vld1q_f32(place + 4 * j);
      vst1q_f32(place + 4 * j,
                vfmaq_n_f32(rescale == 1 ? old : vmulq_n_f32(old, rescale), sum, step));
    }
  }
}

void accumulate_levels(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<Kernel, decltype(format)::value>(job); });
}

}  // namespace

AttentionKernels i8mm_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "i8mm";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  kernels.byte_step = kernels.nibble_step = 16;
  return kernels;
}

}  // namespace gyre::cpu
