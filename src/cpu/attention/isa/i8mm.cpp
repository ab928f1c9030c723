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

// acc += the 2 x 2 dot products of two rows of eight bytes each. g++ 12 copies the accumulators of
// the intrinsic if there are many. Volatile: they stay in order.
template <bool kMany>
inline void add_mma(int32x4_t& acc, int8x16_t a, int8x16_t b) {
  if constexpr (kMany)
    __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(a), "w"(b));
  else
    acc = vmmlaq_s32(acc, a, b);
}

// Rows are paired: one operand has hi of both, the next one lo of both. A last row without a
// partner has hi and lo in one.

constexpr size_t kPairs = kTile / 2;  // of keys that share a pass over the queries

// Multiplies keys with kRows queries over 8 coordinates of a chunk, those of level<j>()'s
// vector `half`: acc[row][pair of keys] holds {first x key 0, first x key 1, second x key 0, second
// x key 1} of an operand's two parts.
template <size_t j, class Tables, class Pair, size_t kRows>
inline void multiply_octet(const Tables& t, const Pair (&keys)[kPairs], size_t half,
                           const int8_t* q, uint64_t q_stride, int32x4_t (&acc)[kRows][kPairs]) {
  int8x16_t k[kPairs];
  for (size_t pair = 0; pair < kPairs; ++pair) k[pair] = keys[pair].template level<j>(t, half);
  for (size_t r = 0; r < kRows; ++r) {
    const int8x16_t query = vld1q_s8(q + r * q_stride + (2 * j + half) * 16);
    for (size_t pair = 0; pair < kPairs; ++pair) add_mma<(kRows > 1)>(acc[r][pair], query, k[pair]);
  }
}

// All 64 coordinates of a chunk; load() gives its keys. They are loaded where they are multiplied:
// the sums leave no registers for those of later coordinates.
template <class Tables, class Load, size_t kRows>
inline void multiply_chunk(const Tables& t, const Load& load, const int8_t* q, uint64_t q_stride,
                           int32x4_t (&acc)[kRows][kPairs]) {
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half) {
    const auto first = load();
    multiply_octet<0>(t, first.at, half, q, q_stride, acc);
    multiply_octet<1>(t, first.at, half, q, q_stride, acc);
    const auto second = load();
    multiply_octet<2>(t, second.at, half, q, q_stride, acc);
    multiply_octet<3>(t, second.at, half, q, q_stride, acc);
  }
}

inline int32x4_t join_firsts(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vtrn1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
inline int32x4_t join_seconds(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vtrn2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// 256 times the sums over hi plus those over lo, of vectors i and i + 1: sums[row].
template <size_t kRows, size_t kVectors>
inline void join_rows(const int32x4_t (&acc)[kRows][kVectors], size_t i, int32x4_t (&sums)[kRows]) {
  for (size_t r = 0; r + 1 < kRows; r += 2) {
    const int32x4_t a = vmlaq_n_s32(acc[r + 1][i], acc[r][i], 256);
    const int32x4_t b = vmlaq_n_s32(acc[r + 1][i + 1], acc[r][i + 1], 256);
    sums[r] = join_firsts(a, b);
    sums[r + 1] = join_seconds(a, b);
  }
  if constexpr (kRows % 2 != 0) {
    const int32x4_t a = acc[kRows - 1][i], b = acc[kRows - 1][i + 1];
    sums[kRows - 1] = vmlaq_n_s32(join_seconds(a, b), join_firsts(a, b), 256);
  }
}

// Pairs rows whose operands have hi and lo of eight coordinates.
void pair_queries(int8_t* q, uint32_t rows, uint32_t row_levels) {
  const size_t row_bytes = size_t{2} * row_levels;
  for (uint32_t r = 0; r + 1 < rows; r += 2, q += 2 * row_bytes) {
    for (size_t i = 0; i < row_bytes; i += 16) {
      const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(q + i));
      const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(q + row_bytes + i));
      vst1q_s8(q + i, vreinterpretq_s8_s64(vtrn1q_s64(a, b)));
      vst1q_s8(q + row_bytes + i, vreinterpretq_s8_s64(vtrn2q_s64(a, b)));
    }
  }
}

// The pairs of keys of a tile, loaded by load(first key).
template <class Load>
inline auto load_pairs(const uint8_t* keys, uint64_t stride, const Load& load) {
  struct {
    decltype(load(keys)) at[kPairs];
  } pairs{{load(keys), load(keys + 2 * stride), load(keys + 4 * stride), load(keys + 6 * stride)}};
  return pairs;
}

template <uint32_t kFormat, size_t kRows>
inline void score_tile(const ScoreJob& job, const typename Keys<kFormat>::Tables& tables,
                       size_t row, size_t tile) {
  const uint64_t q_stride = uint64_t{2} * job.head_dim, stride = job.key_stride;
  const int8_t* const q = job.q + row * q_stride;
  const uint8_t* const keys = job.keys + tile * kTile * stride;
  const uint8_t* const scales = job.scales + tile * job.scales_stride;
  for (size_t b = 0; b < job.blocks->count; ++b) {
    int32x4_t acc[kRows][kPairs];
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t pair = 0; pair < kPairs; ++pair) acc[r][pair] = vdupq_n_s32(0);
    }
    size_t c = job.blocks->begin[b];
    const size_t end = c + job.blocks->size[b];
    for (; c + 64 <= end; c += 64) {
      const auto load = [&] {
        const uint8_t* here = keys;
        __asm__ volatile("" : "+r"(here));  // not before the MMAs ahead
        return load_pairs(here, stride, [&](const uint8_t* at) {
          return load_pair<Keys<kFormat>, kFormat>(at, stride, job.head_dim, c);
        });
      };
      multiply_chunk(tables, load, q + 2 * c, q_stride, acc);
    }
    if constexpr (kBySixteen<kFormat>) {
      for (; c < end; c += 16) {
        const auto loaded = load_pairs(keys, stride, [&](const uint8_t* at) {
          return load_sixteen<Interleaved, kFormat>(at, stride, job.head_dim, c);
        });
        multiply_octet<0>(tables, loaded.at, 0, q + 2 * c, q_stride, acc);
        multiply_octet<0>(tables, loaded.at, 1, q + 2 * c, q_stride, acc);
      }
    }
    for (size_t i = 0; i < kPairs; i += 2) {
      const float32x4_t scale = key_scales(scales + b * kTile * 2 + 4 * i);
      int32x4_t sums[kRows];
      join_rows(acc, i, sums);
      for (size_t r = 0; r < kRows; ++r) {
        const int32_t bias = kCodeBias<kFormat> * job.q_sums[(row + r) * abi::kKvMaxScales + b];
        float* const score = job.scores + (row + r) * kBlockKeys + tile * kTile + 2 * i;
        const float32x4_t sum = vcvtq_f32_s32(level_sum<kFormat>(sums[r], bias));
        vst1q_f32(score, vfmaq_f32(b == 0 ? vdupq_n_f32(0) : vld1q_f32(score), sum, scale));
      }
    }
  }
}

template <uint32_t kFormat, size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  const typename Keys<kFormat>::Tables tables;
  for (size_t tile = 0; tile < job.key_count / kTile; ++tile) {
    if (row == 0) prefetch_steps(job.prefetch, tile * kTile, (tile + 1) * kTile);
    score_tile<kFormat, kRows>(job, tables, row, tile);
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

// Sums kOctets * 8 coordinates from c on over all tiles: acc[row][pair of coordinates], of paired
// weights.
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
  int32x4_t sums[kOctets * 2][kRows];
  for (size_t j = 0; j < kOctets * 2; ++j) join_rows(acc, 2 * j, sums[j]);
  for (size_t r = 0; r < kRows; ++r)
    add_sums<kFormat, 2 * kOctets>(job, weights, row + r, c, [&](size_t j) { return sums[j][r]; });
}

}  // namespace

AttentionKernels i8mm_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "i8mm";
  kernels.arrange_queries = pair_queries;
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels<Kernel>;
  kernels.byte_step = kernels.nibble_step = 16;
  return kernels;
}

}  // namespace gyre::cpu
