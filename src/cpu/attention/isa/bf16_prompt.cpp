// A prompt's inner loops over f16 and bf16 with Armv8.6's bf16 MMA. Nothing here may be
// instantiated elsewhere: the file is compiled with instructions other machines lack.
//
// Operands are split as in amx_bf16.cpp, with the same errors: queries into two bf16, f16 keys and
// values into two, probabilities are the nearest bf16. An MMA multiplies four numbers of two rows
// with four of two keys or coordinates, 16 products; f32 needs four instructions for as many. MMAs
// for each 16 products of QK and PV: 2 and 1 over bf16, 3 and 2 over f16, where f32 needs 4 and 4.
//
// Everything is packed in pairs of rows, keys or coordinates before it is multiplied, so that the
// inner loop has no permutation: eight loads for 16 MMAs.
#include <arm_neon.h>

#include <cstddef>
#include <cstring>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/non_finite_values.h"
#include "gyre/format.h"

namespace gyre::cpu {
namespace {

constexpr uint32_t kF16 = static_cast<uint32_t>(KvFormat::f16);
constexpr size_t kPairs = 4;  // of rows, and of keys or coordinates, that an inner loop takes

inline bfloat16x8_t load_bf16(const uint16_t* at) { return vreinterpretq_bf16_u16(vld1q_u16(at)); }

struct Split {
  uint16x4_t hi, lo;
};

// The nearest bf16, and the nearest to the rest.
inline Split split(float32x4_t x) {
  const uint16x4_t hi = vreinterpret_u16_bf16(vcvt_bf16_f32(x));
  const float32x4_t remainder = vsubq_f32(x, vreinterpretq_f32_u32(vshll_n_u16(hi, 16)));
  return {hi, vreinterpret_u16_bf16(vcvt_bf16_f32(remainder))};
}

// Four numbers as they are stored.
template <bool kHalf>
inline Split split_stored(uint16x4_t stored) {
  if constexpr (!kHalf) return {stored, vdup_n_u16(0)};
  return split(vcvt_f32_f16(vreinterpret_f16_u16(stored)));
}

// Rounding must not make an infinity of a large number.
inline float32x4_t fit(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t size = vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF));
  const uint32x4_t large =
      vandq_u32(vcgtq_u32(size, vdupq_n_u32(0x7F7F0000)), vcltq_u32(size, vdupq_n_u32(0x7F800000)));
  const uint32x4_t cut = vandq_u32(bits, vdupq_n_u32(0xFFFF0000));
  return vreinterpretq_f32_u32(vbslq_u32(large, cut, bits));
}

// Queries in their own place, a pair of rows after the other: hi of each four coordinates of both
// rows, then all lo. A row that is not there is 0.
uint32_t split_queries(float* q, uint32_t rows, uint32_t head_dim, uint32_t /*format*/) {
  alignas(16) float two[2][abi::kKvMaxHeadDim];
  for (size_t r = 0; r < rows; r += 2) {
    for (size_t i = 0; i < 2; ++i) {
      if (r + i < rows) std::memcpy(two[i], q + (r + i) * head_dim, head_dim * sizeof(float));
      if (r + i >= rows) std::memset(two[i], 0, head_dim * sizeof(float));
    }
    auto* const hi = reinterpret_cast<uint16_t*>(q + r * head_dim);
    uint16_t* const lo = hi + 2 * head_dim;
    for (size_t c = 0; c < head_dim; c += 4) {
      for (size_t i = 0; i < 2; ++i) {
        const Split parts = split(fit(vld1q_f32(two[i] + c)));
        vst1_u16(hi + 2 * c + 4 * i, parts.hi);
        vst1_u16(lo + 2 * c + 4 * i, parts.lo);
      }
    }
  }
  return head_dim;
}

// Keys in pairs, as queries; of f16 hi of a pair and then lo, bf16 has no lo.
template <bool kHalf>
void pack_keys(const ScoreJob& job, uint16_t* to) {
  for (size_t key = 0; key < kBlockKeys; ++key) {
    const size_t there = key < job.key_count ? key : 0;  // replaced, not read
    const auto* const from = job.keys + there * job.key_stride;
    uint16_t* const hi = to + key / 2 * (kHalf ? 4 : 2) * job.head_dim + key % 2 * 4;
    for (size_t c = 0; c < job.head_dim; c += 4) {
      uint16x4_t stored = vdup_n_u16(0);
      std::memcpy(&stored, from + 2 * c, sizeof(stored));
      const Split parts = split_stored<kHalf>(stored);
      vst1_u16(hi + 2 * c, parts.hi);
      if constexpr (kHalf) vst1_u16(hi + 2 * job.head_dim + 2 * c, parts.lo);
    }
  }
}

// sums[i][j] += pair i of a times pair j of b, over `steps` groups of four.
inline void multiply_pairs(const uint16_t* a, size_t a_stride, const uint16_t* b, size_t b_stride,
                           size_t steps, float32x4_t (&sums)[kPairs][kPairs]) {
  for (size_t step = 0; step < steps; ++step, a += 8, b += 8) {
    bfloat16x8_t left[kPairs], right[kPairs];
#pragma GCC unroll 4
    for (size_t i = 0; i < kPairs; ++i) {
      left[i] = load_bf16(a + i * a_stride);
      right[i] = load_bf16(b + i * b_stride);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
      for (size_t j = 0; j < kPairs; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], left[i], right[j]);
    }
  }
}

inline void clear(float32x4_t (&sums)[kPairs][kPairs]) {
  for (auto& of_pair : sums) {
    for (float32x4_t& sum : of_pair) sum = vdupq_n_f32(0);
  }
}

// Row `half` of pair i, with eight keys or coordinates.
inline float32x4x2_t row_of(const float32x4_t (&sums)[kPairs], size_t half) {
  float64x2_t s[kPairs];
  for (size_t j = 0; j < kPairs; ++j) s[j] = vreinterpretq_f64_f32(sums[j]);
  const auto join = [&](size_t j) {
    return vreinterpretq_f32_f64(half == 0 ? vtrn1q_f64(s[j], s[j + 1])
                                           : vtrn2q_f64(s[j], s[j + 1]));
  };
  return {join(0), join(2)};
}

// Scores of eight rows and eight keys; with `again` only those that are not finite, from hi alone.
template <bool kHalf>
bool score_tile(const ScoreJob& job, const uint16_t* packed, size_t row, size_t key, bool again) {
  const size_t q_stride = size_t{4} * job.head_dim,
               k_stride = (kHalf ? 4 : 2) * size_t{job.head_dim};
  const size_t steps = job.head_dim / 4, lo = size_t{2} * job.head_dim;
  const auto* const q = reinterpret_cast<const uint16_t*>(job.q_f32) + row / 2 * q_stride;
  const uint16_t* const k = packed + key / 2 * k_stride;
  float32x4_t sums[kPairs][kPairs];
  clear(sums);
  multiply_pairs(q, q_stride, k, k_stride, steps, sums);
  if (!again) {
    multiply_pairs(q + lo, q_stride, k, k_stride, steps, sums);
    if constexpr (kHalf) multiply_pairs(q, q_stride, k + lo, k_stride, steps, sums);
  }
  bool non_finite = false;
  for (size_t r = 0; r < 2 * kPairs && row + r < job.rows; ++r) {
    float score[8];
    const float32x4x2_t row_sums = row_of(sums[r / 2], r % 2);
    vst1q_f32(score, row_sums.val[0]);
    vst1q_f32(score + 4, row_sums.val[1]);
    float* const at = job.scores + (row + r) * kBlockKeys + key;
    for (size_t i = 0; i < 8 && key + i < job.key_count; ++i) {
      if (!again || at[i] - at[i] != 0) at[i] = score[i];
      non_finite |= at[i] - at[i] != 0;
    }
  }
  return non_finite;
}

template <bool kHalf>
void score_format(const ScoreJob& job) {
  auto* const packed = static_cast<uint16_t*>(job.scratch);
  if (job.fresh) pack_keys<kHalf>(job, packed);
  for (size_t key = 0; key < job.key_count; key += 2 * kPairs) {
    for (size_t row = 0; row < job.rows; row += 2 * kPairs) {
      if (score_tile<kHalf>(job, packed, row, key, false))
        score_tile<kHalf>(job, packed, row, key, true);
    }
  }
}

void score_prompt(const ScoreJob& job) {
  return job.format == kF16 ? score_format<true>(job) : score_format<false>(job);
}

// Probabilities in pairs of rows: of each four keys, those of both.
struct Probabilities {
  alignas(16) uint16_t at[kTileRows / 2][2 * kBlockKeys];

  explicit Probabilities(const AccumulateJob& job) {
    const size_t lanes = job.tiles * abi::kKvTile;  // past them a row may hold anything
    for (size_t r = 0; r < (job.rows + 1) / 2 * 2; ++r) {
      const float* const p = job.p + r * kBlockKeys;
      for (size_t key = 0; key < kBlockKeys; key += 4) {
        const bool there = r < job.rows && key < lanes;
        const float32x4_t x = there ? vld1q_f32(p + key) : vdupq_n_f32(0);
        vst1_u16(at[r / 2] + 2 * key + r % 2 * 4, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
      }
    }
  }
};

// All of V, [eight coordinates][hi, lo][pair of coordinates][four tokens of both]; bf16 has no lo.
// Whether something is not finite.
struct PackedValues {
  static constexpr size_t kOctet = 8 * kBlockKeys;  // numbers: eight coordinates of the block
  uint16_t at[abi::kKvMaxHeadDim / 8 * 2 * kOctet];
  bool non_finite;

  template <bool kHalf>
  void pack(const AccumulateJob& job) {
    non_finite = false;
    for (size_t c = 0; c < job.head_dim; c += 8) {
      for (size_t key = 0; key < kBlockKeys; key += 4)
        pack_quad<kHalf>(job, c, key, at + c / 8 * 2 * kOctet + 2 * key);
    }
  }

  template <bool kHalf>
  void pack_quad(const AccumulateJob& job, size_t c, size_t key, uint16_t* to) {
    uint16x8_t hi[4], lo[4];
    for (size_t i = 0; i < 4; ++i) {
      uint16x8_t stored = vdupq_n_u16(0);
      const size_t token = key + i;
      if (token >= job.begin && token < job.end)
        std::memcpy(&stored, job.values + token * job.value_stride + 2 * c, sizeof(stored));
      const uint16x8_t size = vandq_u16(stored, vdupq_n_u16(0x7FFF));
      const uint16x8_t non_finite_lanes =
          vcgeq_u16(size, vdupq_n_u16(kHalf ? kHalfLimit : kBf16Limit));
      non_finite |= vmaxvq_u16(non_finite_lanes) != 0;
      stored = vbicq_u16(stored, non_finite_lanes);
      const Split low = split_stored<kHalf>(vget_low_u16(stored));
      const Split high = split_stored<kHalf>(vget_high_u16(stored));
      hi[i] = vcombine_u16(low.hi, high.hi);
      lo[i] = vcombine_u16(low.lo, high.lo);
    }
    store_tokens(hi, to);
    if constexpr (kHalf) store_tokens(lo, to + kOctet);
  }

  // Eight coordinates of four tokens: pair i has the tokens of coordinate 2 i, then of 2 i + 1.
  static void store_tokens(const uint16x8_t (&t)[4], uint16_t* to) {
    const uint32x4_t early1 = vreinterpretq_u32_u16(vzip1q_u16(t[0], t[1]));
    const uint32x4_t early2 = vreinterpretq_u32_u16(vzip2q_u16(t[0], t[1]));
    const uint32x4_t late1 = vreinterpretq_u32_u16(vzip1q_u16(t[2], t[3]));
    const uint32x4_t late2 = vreinterpretq_u32_u16(vzip2q_u16(t[2], t[3]));
    constexpr size_t kPair = 2 * kBlockKeys;
    vst1q_u16(to, vreinterpretq_u16_u32(vzip1q_u32(early1, late1)));
    vst1q_u16(to + kPair, vreinterpretq_u16_u32(vzip2q_u32(early1, late1)));
    vst1q_u16(to + 2 * kPair, vreinterpretq_u16_u32(vzip1q_u32(early2, late2)));
    vst1q_u16(to + 3 * kPair, vreinterpretq_u16_u32(vzip2q_u32(early2, late2)));
  }
};
static_assert(sizeof(PackedValues) <= kValueScratchBytes);

// acc = acc * rescale + sums, for eight rows and eight coordinates.
template <bool kHalf>
void accumulate_tile(const AccumulateJob& job, const Probabilities& p, const uint16_t* v,
                     size_t row, size_t c) {
  constexpr size_t kStride = 2 * kBlockKeys, kSteps = kBlockKeys / 4;
  float32x4_t sums[kPairs][kPairs];
  clear(sums);
  multiply_pairs(p.at[row / 2], kStride, v, kStride, kSteps, sums);
  if constexpr (kHalf)
    multiply_pairs(p.at[row / 2], kStride, v + PackedValues::kOctet, kStride, kSteps, sums);
  for (size_t r = 0; r < 2 * kPairs && row + r < job.rows; ++r) {
    const float32x4x2_t row_sums = row_of(sums[r / 2], r % 2);
    float* const at = job.acc + (row + r) * job.head_dim + c;
    const float rescale = job.rescale[row + r];
    vst1q_f32(at, vfmaq_n_f32(row_sums.val[0], vld1q_f32(at), rescale));
    vst1q_f32(at + 4, vfmaq_n_f32(row_sums.val[1], vld1q_f32(at + 4), rescale));
  }
}

template <bool kHalf>
void accumulate_format(const AccumulateJob& job) {
  auto* const packed = static_cast<PackedValues*>(job.scratch);
  if (job.fresh) packed->pack<kHalf>(job);
  const Probabilities p(job);
  for (size_t c = 0; c < job.head_dim; c += 8) {
    for (size_t row = 0; row < job.rows; row += 2 * kPairs)
      accumulate_tile<kHalf>(job, p, packed->at + c / 8 * 2 * PackedValues::kOctet, row, c);
  }
  if (!packed->non_finite) return;
  add_non_finite_values(job, kHalf ? kHalfLimit : kBf16Limit, [](uint16_t stored) {
    if constexpr (kHalf)
      return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(stored))), 0);
    return __builtin_bit_cast(float, static_cast<uint32_t>(stored) << 16);
  });
}

void accumulate_prompt(const AccumulateJob& job) {
  return job.format == kF16 ? accumulate_format<true>(job) : accumulate_format<false>(job);
}

}  // namespace

void add_bf16_prompt_kernels(AttentionKernels& kernels) {
  kernels.split_queries = split_queries;
  kernels.score_prompt = score_prompt;
  kernels.accumulate_prompt = accumulate_prompt;
  kernels.prompt_rows =
      kMaxRows;  // splitting a block costs a quarter of multiplying 64 rows with it
  kernels.f16_arithmetic = kernels.bf16_arithmetic = "bf16";
}

}  // namespace gyre::cpu
