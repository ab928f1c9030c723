// Decode attention's inner loops over bf16 with Armv8.6's bf16 MMA. Nothing here may be
// instantiated elsewhere: the file is compiled with instructions other machines lack.
//
// A query or a probability in f32 is split into two bf16, hi, the nearest, and lo, the nearest to
// the rest: 17 bits. One MMA multiplies both with four coordinates of two keys, or with four tokens
// of two coordinates. Vector instructions for each eight bf16 read, where f32 needs two to widen
// them and two per row, 4, 6, 10 for 1, 2, 4 rows:
//   K: 1 to interleave two keys and 1 per row: 2, 3, 5. The dot product needs 2 per row.
//   V: 2 to interleave four tokens and 1 per row: 3, 4, 6. The dot product needs 1 and 2 per row,
//      the widening multiply-add 4 per row.
//
// The instruction flushes subnormal numbers: what is below 1e-38 is lost. Sums over hi and over lo
// stay apart until the end. hi is 0 only if the whole is, so its sum shows infinities and NaN as
// f32 would; lo may be 0 or have the other sign, and turn an infinity into NaN, so a sum over lo
// that is not finite is dropped.
#include <arm_neon.h>

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/prefetch.h"

namespace gyre::cpu {
namespace {

inline bfloat16x8_t as_bf16(uint16x8_t x) { return vreinterpretq_bf16_u16(x); }
inline bfloat16x8_t as_bf16(uint32x4_t x) { return vreinterpretq_bf16_u32(x); }
inline bfloat16x8_t as_bf16(uint64x2_t x) { return vreinterpretq_bf16_u64(x); }

// hi + lo, from {hi 0, hi 1, lo 0, lo 1} and {hi 2, hi 3, lo 2, lo 3}.
inline float32x4_t join_hi_lo(float32x4_t first, float32x4_t second) {
  const float64x2_t a = vreinterpretq_f64_f32(first), b = vreinterpretq_f64_f32(second);
  const float32x4_t hi = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
  const float32x4_t lo = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
  const uint32x4_t finite = vcagtq_f32(vdupq_n_f32(__builtin_inff()), lo);
  return vbslq_f32(finite, vfmaq_n_f32(hi, lo, 1 / kBf16Lift), hi);
}

// Multiplies 2 * kPairs keys with kRows queries: sums[row][pair] holds {hi x key 0, hi x key 1,
// lo x key 0, lo x key 1}.
template <size_t kRows, size_t kPairs>
inline void score_pairs(const ScoreJob& job, size_t row, size_t key, size_t keys) {
  const size_t q_stride = size_t{2} * job.head_dim;
  const auto* const q = reinterpret_cast<const uint16_t*>(job.q) + row * q_stride;
  const uint8_t* k[2 * kPairs];
  for (size_t i = 0; i < 2 * kPairs; ++i)  // a key that is not there is replaced, not read
    k[i] = job.keys + (key + (i < keys ? i : 0)) * job.key_stride;
  float32x4_t sums[kRows][kPairs];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = vdupq_n_f32(0);
  }
  for (size_t c = 0; c < job.head_dim; c += 8) {
    bfloat16x8_t pairs[2][kPairs];
    for (size_t i = 0; i < kPairs; ++i) {
      const uint64x2_t a = vreinterpretq_u64_u8(vld1q_u8(k[2 * i] + 2 * c));
      const uint64x2_t b = vreinterpretq_u64_u8(vld1q_u8(k[2 * i + 1] + 2 * c));
      pairs[0][i] = as_bf16(vtrn1q_u64(a, b));
      pairs[1][i] = as_bf16(vtrn2q_u64(a, b));
    }
    for (size_t half = 0; half < 2; ++half) {
      for (size_t r = 0; r < kRows; ++r) {
        const bfloat16x8_t query = as_bf16(vld1q_u16(q + r * q_stride + 2 * c + 8 * half));
        for (size_t i = 0; i < kPairs; ++i)
          sums[r][i] = vbfmmlaq_f32(sums[r][i], query, pairs[half][i]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float lanes[2 * kPairs];
    for (size_t i = 0; i < kPairs; i += 2)
      vst1q_f32(lanes + 2 * i, join_hi_lo(sums[r][i], sums[r][i + 1]));
    float* const scores = job.scores + (row + r) * kBlockKeys + key;
    for (size_t i = 0; i < keys; ++i) scores[i] = lanes[i];
  }
}

template <size_t kRows>
void score_rows(const ScoreJob& job, size_t row) {
  constexpr size_t kPairs = kRows == 4 ? 2 : 4;  // enough sums to hide the latency of the MMA
  for (size_t key = 0; key < job.key_count; key += 2 * kPairs) {
    if (row == 0) prefetch_steps(job.prefetch, key, key + 2 * kPairs);
    const size_t left = job.key_count - key;
    score_pairs<kRows, kPairs>(job, row, key, left < 2 * kPairs ? left : 2 * kPairs);
  }
}

void score_bf16(const ScoreJob& job) {
  size_t row = 0;
  for (; row + 4 <= job.rows; row += 4) score_rows<4>(job, row);
  for (; row + 2 <= job.rows; row += 2) score_rows<2>(job, row);
  if (row < job.rows) score_rows<1>(job, row);
}

// Probabilities of the keys that may be read: hi of each four, then lo; zeros after the last.
struct SplitProbabilities {
  alignas(16) uint16_t p[kTileRows][kBlockKeys / 4][8];

  explicit SplitProbabilities(const AccumulateJob& job) {
    for (size_t r = 0; r < job.rows; ++r) {
      const float* const from = job.p + r * kBlockKeys;
      size_t key = job.begin, quad = 0;
      for (; key + 4 <= job.end; key += 4) split(vld1q_f32(from + key), p[r][quad++]);
      if (key == job.end) continue;
      float last[4] = {};
      for (size_t i = 0; key + i < job.end; ++i) last[i] = from[key + i];
      split(vld1q_f32(last), p[r][quad]);
    }
  }
  static void split(float32x4_t x, uint16_t* to) {
    const uint16x4_t hi = vreinterpret_u16_bf16(vcvt_bf16_f32(x));
    const float32x4_t remainder = vsubq_f32(x, vreinterpretq_f32_u32(vshll_n_u16(hi, 16)));
    vst1_u16(to, hi);
    vst1_u16(to + 4, vreinterpret_u16_bf16(vcvt_bf16_f32(vmulq_n_f32(remainder, kBf16Lift))));
  }
};

// Loads eight coordinates of four tokens: v[i] holds the tokens of coordinate 2i, then of 2i + 1.
inline void load_tokens(const uint8_t* const (&token)[4], size_t c, bfloat16x8_t (&v)[4]) {
  uint16x8_t t[4];
  for (size_t i = 0; i < 4; ++i) t[i] = vreinterpretq_u16_u8(vld1q_u8(token[i] + 2 * c));
  const uint32x4_t early1 = vreinterpretq_u32_u16(vzip1q_u16(t[0], t[1]));
  const uint32x4_t early2 = vreinterpretq_u32_u16(vzip2q_u16(t[0], t[1]));
  const uint32x4_t late1 = vreinterpretq_u32_u16(vzip1q_u16(t[2], t[3]));
  const uint32x4_t late2 = vreinterpretq_u32_u16(vzip2q_u16(t[2], t[3]));
  v[0] = as_bf16(vzip1q_u32(early1, late1)), v[1] = as_bf16(vzip2q_u32(early1, late1));
  v[2] = as_bf16(vzip1q_u32(early2, late2)), v[3] = as_bf16(vzip2q_u32(early2, late2));
}

// Stands in for a token that is not there: 0 times what another slot holds could be NaN.
alignas(16) constexpr uint8_t kZeros[2 * abi::kKvMaxHeadDim] = {};

template <size_t kRows, size_t kVectors>
inline void accumulate_chunk(const AccumulateJob& job, const SplitProbabilities& split, size_t row,
                             size_t c) {
  float32x4_t sums[kRows][4 * kVectors];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = vdupq_n_f32(0);
  }
  const uint64_t stride = job.value_stride;
  const uint8_t* value = job.values + job.begin * stride;
  const size_t count = job.end - job.begin;
  for (size_t quad = 0; 4 * quad < count; ++quad, value += 4 * stride) {
    const size_t left = count - 4 * quad;
    const uint8_t* const token[4] = {value, left > 1 ? value + stride : kZeros,
                                     left > 2 ? value + 2 * stride : kZeros,
                                     left > 3 ? value + 3 * stride : kZeros};
    for (size_t i = 0; i < kVectors; ++i) {
      bfloat16x8_t v[4];
      load_tokens(token, c + 8 * i, v);
      for (size_t r = 0; r < kRows; ++r) {
        const bfloat16x8_t p = as_bf16(vld1q_u16(split.p[row + r][quad]));
        for (size_t j = 0; j < 4; ++j)
          sums[r][4 * i + j] = vbfmmlaq_f32(sums[r][4 * i + j], p, v[j]);
      }
    }
  }
  // The block is summed up before it is added: single keys would vanish beside a large sum.
  float* const place = job.acc + row * job.head_dim + c;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < 2 * kVectors; ++i) {
      float* const at = place + r * job.head_dim + 4 * i;
      const float32x4_t sum = join_hi_lo(sums[r][2 * i], sums[r][2 * i + 1]);
      vst1q_f32(at, vfmaq_n_f32(sum, vld1q_f32(at), job.rescale[row + r]));
    }
  }
}

template <size_t kRows>
void accumulate_rows(const AccumulateJob& job, const SplitProbabilities& split, size_t row) {
  constexpr size_t kVectors = kRows == 4 ? 1 : 2;  // enough sums to hide the latency of the MMA
  size_t c = 0;
  for (; c + 8 * kVectors <= job.head_dim; c += 8 * kVectors) {
    if (row == 0) prefetch_steps(job.prefetch, c / 8, c / 8 + kVectors);
    accumulate_chunk<kRows, kVectors>(job, split, row, c);
  }
  if (c < job.head_dim) accumulate_chunk<kRows, 1>(job, split, row, c);
}

void accumulate_bf16(const AccumulateJob& job) {
  const SplitProbabilities split(job);
  size_t row = 0;
  for (; row + 4 <= job.rows; row += 4) accumulate_rows<4>(job, split, row);
  for (; row + 2 <= job.rows; row += 2) accumulate_rows<2>(job, split, row);
  if (row < job.rows) accumulate_rows<1>(job, split, row);
}

}  // namespace

void add_bf16_attention_kernels(AttentionKernels& kernels) {
  kernels.score_bf16 = score_bf16;
  kernels.accumulate_bf16 = accumulate_bf16;
  kernels.split_bf16_queries = true;
  kernels.bf16_arithmetic = "bf16";
}

}  // namespace gyre::cpu
