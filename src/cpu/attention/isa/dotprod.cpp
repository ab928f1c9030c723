// Decode attention's inner loops over levels with Armv8.2's int8 dot product, for machines without
// int8 MMA. Nothing here may be instantiated elsewhere: the file is compiled with instructions
// other machines lack.
#include <arm_neon.h>

#include <cstddef>
#include <type_traits>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/unpacked_neon.h"
#include "cpu/attention/isa/weights_neon.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

template <uint32_t kFormat>
using Keys = typename KeysOf<OneByOne, kFormat>::Pair;

inline int32x4_t join_hi_lo(int32x4_t hi, int32x4_t lo) {
  return vaddq_s32(vshlq_n_s32(hi, 8), lo);
}

// Dot products of a query's hi and lo bytes with one key, not yet summed over lanes.
struct KeySums {
  int32x4_t hi = vdupq_n_s32(0), lo = vdupq_n_s32(0);
};

// Multiplies 2 * kPairs keys with kRows queries over 16 coordinates of a chunk.
template <size_t j, size_t kRows, size_t kPairs, class Tables, class Pair>
inline void multiply_keys(const Tables& tables, const Pair (&keys)[kPairs], const int8_t* q,
                          size_t head_dim, KeySums (&sums)[kRows][2 * kPairs]) {
  int8x16_t k[kPairs][2];
  for (size_t i = 0; i < 2 * kPairs; ++i)
    k[i / 2][i % 2] = keys[i / 2].template level<j>(tables, i % 2);
  for (size_t r = 0; r < kRows; ++r) {
    const int8_t* const row = q + 2 * r * head_dim + 16 * j;
    const int8x16_t hi = vld1q_s8(row), lo = vld1q_s8(row + head_dim);
    for (size_t i = 0; i < 2 * kPairs; ++i) {
      sums[r][i].hi = vdotq_s32(sums[r][i].hi, hi, k[i / 2][i % 2]);
      sums[r][i].lo = vdotq_s32(sums[r][i].lo, lo, k[i / 2][i % 2]);
    }
  }
}

// All 64 coordinates of a chunk.
template <uint32_t kFormat, size_t kRows, size_t kPairs>
inline void multiply_chunk(const typename Keys<kFormat>::Tables& tables,
                           const Keys<kFormat> (&keys)[kPairs], const int8_t* q, size_t head_dim,
                           KeySums (&sums)[kRows][2 * kPairs]) {
  multiply_keys<0, kRows, kPairs>(tables, keys, q, head_dim, sums);
  multiply_keys<1, kRows, kPairs>(tables, keys, q, head_dim, sums);
  multiply_keys<2, kRows, kPairs>(tables, keys, q, head_dim, sums);
  multiply_keys<3, kRows, kPairs>(tables, keys, q, head_dim, sums);
}

// First row, first key and scale block of what multiply_block takes.
struct Place {
  size_t row, key, block;
};

// Multiplies 2 * kPairs keys with kRows queries over one scale block: products[4 * row + key], not
// yet summed over lanes.
template <uint32_t kFormat, size_t kRows, size_t kPairs>
inline void multiply_block(const ScoreJob& job, const typename Keys<kFormat>::Tables& tables,
                           const Place& at, int32x4_t* products) {
  KeySums sums[kRows][2 * kPairs];
  const uint64_t stride = job.key_stride;
  const uint8_t* const keys = job.keys + at.key * stride;
  const int8_t* const q = job.q + 2 * at.row * job.head_dim;
  size_t c = job.blocks->begin[at.block];
  const size_t end = c + job.blocks->size[at.block];
  for (; c + 64 <= end; c += 64) {
    const auto pair = load_pair<Keys<kFormat>, kFormat>(keys, stride, job.head_dim, c);
    if constexpr (kPairs == 1) {
      multiply_chunk<kFormat, kRows, 1>(tables, {pair}, q + c, job.head_dim, sums);
    } else {
      const auto next =
          load_pair<Keys<kFormat>, kFormat>(keys + 2 * stride, stride, job.head_dim, c);
      multiply_chunk<kFormat, kRows, 2>(tables, {pair, next}, q + c, job.head_dim, sums);
    }
  }
  if constexpr (kBySixteen<kFormat>) {
    for (; c < end; c += 16) {
      const auto pair = load_sixteen<OneByOne, kFormat>(keys, stride, job.head_dim, c);
      using Pair = std::remove_const_t<decltype(pair)>;
      if constexpr (kPairs == 1) {
        const Pair loaded[1] = {pair};
        multiply_keys<0, kRows, 1>(tables, loaded, q + c, job.head_dim, sums);
      } else {
        const Pair loaded[2] = {
            pair, load_sixteen<OneByOne, kFormat>(keys + 2 * stride, stride, job.head_dim, c)};
        multiply_keys<0, kRows, 2>(tables, loaded, q + c, job.head_dim, sums);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kPairs; ++i)
      products[4 * r + i] = join_hi_lo(sums[r][i].hi, sums[r][i].lo);
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
      const int32_t bias = kCodeBias<kFormat> * job.q_sums[(row + r) * abi::kKvMaxScales + b];
      score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(level_sum<kFormat>(sum, bias)), scale);
    }
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
  for_row_groups(job.rows, [&](auto rows, size_t row) {
    score_rows<kFormat, decltype(rows)::value>(job, row);
  });
}

void score_levels(const ScoreJob& job) {
  with_native_format(job.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::value;
    if (!unpacks_once<kFormat>(job.rows)) return score_format<kFormat>(job);
    score_format<kUnpacked>(with_unpacked_keys<OneByOne, kFormat>(job));
  });
}

// Dot products of a row's hi and lo weights with kOctets * 8 coordinates, four to a vector.
template <size_t kOctets>
struct ValueSums {
  int32x4_t hi[2 * kOctets], lo[2 * kOctets];
  ValueSums() {
    for (size_t i = 0; i < 2 * kOctets; ++i) hi[i] = lo[i] = vdupq_n_s32(0);
  }
  void add(int8x16_t p, size_t octet, const int8x16_t (&v)[4]) {
    for (size_t half = 0; half < 2; ++half) {
      int32x4_t& h = hi[2 * octet + half];
      int32x4_t& l = lo[2 * octet + half];
      h = vdotq_laneq_s32(h, v[2 * half], p, 0);
      l = vdotq_laneq_s32(l, v[2 * half], p, 2);
      h = vdotq_laneq_s32(h, v[2 * half + 1], p, 1);
      l = vdotq_laneq_s32(l, v[2 * half + 1], p, 3);
    }
  }
};

struct Kernel {
  using Bytes = SignedBytes;
  using Order = FourTokens;
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
  ValueSums<kOctets> sums[kRows];
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    for (size_t octet = 0; octet < kOctets; ++octet) {
      int8x16_t v[4];
      unpack.load(job.values + tile * job.value_stride, job.head_dim, c + 8 * octet, v);
      for (size_t r = 0; r < kRows; ++r)
        sums[r].add(vreinterpretq_s8_u8(vld1q_u8(weights.bytes[row + r][tile])), octet, v);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    add_sums<kFormat, 2 * kOctets>(job, weights, row + r, c, [&](size_t i) {
      return join_hi_lo(sums[r].hi[i], sums[r].lo[i]);
    });
  }
}

}  // namespace

AttentionKernels dotprod_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "dotprod";
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels<Kernel>;
  kernels.query_layout = QueryLayout::hi_then_lo;
  kernels.byte_step = kernels.nibble_step = 16;
  return kernels;
}

}  // namespace gyre::cpu
