#pragma once
// Decode attention: scores to the weights of V (sums.cuh). They are relative to a running reference
// max that rises only when a logit is far above it: sums are rescaled seldom.
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/decode/key_reader.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/sums.cuh"

namespace gyre::cuda {

// B fragments of the MMA over V: weights of the 8 tokens of tile j, upper bytes in even columns,
// lower bytes in odd ones. Lane (g, j) had those of row j and keys 4 g to 4 g + 3.
inline void transpose_weights(const LaneWeights& lane, const uint32_t* w, uint32_t (&b)[2]) {
  const uint32_t first = permute(w[0], w[1], 0x5140), last = permute(w[2], w[3], 0x5140);
  // Lanes of even g send upper bytes to even columns while those of odd g send lower bytes to odd
  // columns; then the other way round.
  const auto source = static_cast<int>(lane.source);
  const uint32_t one = __shfl_sync(kAll, permute(first, last, lane.selector), source);
  const uint32_t other =
      __shfl_sync(kAll, permute(first, last, lane.selector ^ 0x2222u), source ^ 4);
  const bool even = threadIdx.x % 8 < 4;
  b[0] = even ? one : other;
  b[1] = even ? other : one;
}

// Divides sums of a scale block by 2^shift, to the nearest. The remainder of the upper bytes' sum
// goes to the lower bytes': half a unit of the upper alone would be 128 of the lower.
template <class Traits>
inline void rescale_sums(const LaneWeights& lane, uint32_t block, uint32_t four, uint32_t shift,
                         LevelSums<Traits>& to) {
  constexpr uint32_t kMax = 48, kStep = 16;  // 48 leave nothing of a sum; 16 fit in 32-bit sums
  uint32_t& weight_sum = to.fixed[block][four].weight_sum;
  auto weights = static_cast<int32_t>(weight_sum - lane.surplus);
#pragma unroll 1
  for (uint32_t left = shift < kMax ? shift : kMax; left != 0;) {
    const uint32_t by = left < kStep ? left : kStep;
    const int32_t half = 1 << (by - 1), mask = (1 << by) - 1;
#pragma unroll
    for (uint32_t i = 0; i < to.kSums * 2; ++i) {
      if (to.block_of(i / 2) != block) continue;
      int32_t &upper = to.sums[four][i / 2][i % 2 * 2],
              &lower = to.sums[four][i / 2][i % 2 * 2 + 1];
      lower = (lower + (upper & mask) * 256 + half) >> by;
      upper >>= by;
    }
    weights = (weights + half) >> by;
    left -= by;
  }
  weight_sum = static_cast<uint32_t>(weights) + lane.surplus;
}

// Which rows' weights fit, and whose sum is an ordinary number.
template <uint32_t kBlocks, uint32_t kRowQuads, uint32_t kKeys>
inline void find_rows_that_fit(const uint32_t (&w)[kBlocks][kRowQuads][kKeys],
                               const float (&sum)[kRowQuads], bool (&fits)[kRowQuads]) {
  const uint32_t row_lanes = 0x11111111u << threadIdx.x % 4;
#pragma unroll
  for (uint32_t four = 0; four < kRowQuads; ++four) {
    uint32_t all = 0;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks * kKeys; ++i) all |= w[i / kKeys][four][i % kKeys];
    const bool outside = all >= kTooLarge || !(sum[four] < 0x1p64f);
    fits[four] = (__ballot_sync(kAll, outside) & row_lanes) == 0;
  }
}

// Scores and scales of V to weights, whatever they are: references and fixed-point scales are
// adapted. Sums of a block and row must then be shifted right by `shift`. Rows that fit keep their
// weights: what another row needs must not show in their bits.
template <class Traits, uint32_t kBlocks, uint32_t kRowQuads, uint32_t kKeys>
inline void softmax_weights_any(const LaneWeights& lane, const float (&x)[kRowQuads][kKeys],
                                const float (&scales)[kBlocks][kKeys],
                                const float (&sum)[kRowQuads], LevelSums<Traits>& to,
                                uint32_t (&w)[kBlocks][kRowQuads][kKeys],
                                uint32_t (&shift)[kBlocks][kRowQuads]) {
  float largest[kRowQuads], weights[kBlocks][kRowQuads][kKeys], max_weight[kBlocks * kRowQuads];
  bool known[kBlocks][kRowQuads], fits[kRowQuads];
  find_rows_that_fit(w, sum, fits);
#pragma unroll
  for (uint32_t i = 0; i < kRowQuads; ++i) largest[i] = max_of(x[i]);
  eight_lanes_max(largest);
#pragma unroll
  for (uint32_t four = 0; four < kRowQuads; ++four) {
    LevelRow& r = to.row[four];
    uint32_t rise = 0;
    if (!fits[four] && largest[four] - r.reference > kFarAbove - kReferenceHeadroom) {
      const float up = ceilf(fmaxf(largest[four], kLowest)) + kReferenceHeadroom;
      r.sum *= exp2_fast(r.reference - up);
      rise = static_cast<uint32_t>(fminf(up - r.reference, 512.0f));
      r.reference = up;
    }
#pragma unroll
    for (uint32_t block = 0; block < kBlocks; ++block) {
      shift[block][four] = rise;
      max_weight[block * kRowQuads + four] = 0;
      known[block][four] = true;
    }
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      const float p = exp2_fast(x[four][i] - r.reference);
      r.sum += p;
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block) {
        // The scale of a slot without a key may be NaN, or never written.
        const float weight = p == 0 ? 0.0f : p * scales[block][i];
        float& of = max_weight[block * kRowQuads + four];
        weights[block][four][i] = weight;
        of = fmaxf(of, weight);
        known[block][four] = known[block][four] && !is_nan(weight);
      }
    }
    if (fits[four]) r.sum = sum[four];
  }
  eight_lanes_max(max_weight);
#pragma unroll
  for (uint32_t i = 0; i < kBlocks * kRowQuads; ++i) {
    const uint32_t block = i / kRowQuads, four = i % kRowQuads;
    FixedPoint& of = to.fixed[block][four];
    const uint32_t row_lanes = 0x11111111u << threadIdx.x % 4;
    const bool unknown = (__ballot_sync(kAll, !known[block][four]) & row_lanes) != 0;
    if (fits[four]) continue;
    shift[block][four] = rescale_weights(of, max_weight[i], shift[block][four]);
    if (unknown) of.scale = __uint_as_float(0x7FC00000u);
#pragma unroll
    for (uint32_t key = 0; key < kKeys; ++key) {
      const float weight = weights[block][four][key];
      w[block][four][key] = of.scale == 0 ? kIntegers + (weight == -minus_infinity() ? 1u : 0u)
                                          : to_integer(fmaf(weight, of.scale, lane.dither));
    }
  }
}

// softmax_weights_any, and what it asks for.
template <class Traits, uint32_t kBlocks, uint32_t kRowQuads, uint32_t kKeys>
inline void softmax_weights_rescaled(const LaneWeights& lane, const float (&x)[kRowQuads][kKeys],
                                     const float (&scales)[kBlocks][kKeys],
                                     const float (&sum)[kRowQuads], LevelSums<Traits>& to,
                                     uint32_t (&w)[kBlocks][kRowQuads][kKeys]) {
  uint32_t shift[kBlocks][kRowQuads];
  bool held[kRowQuads], any = false;  // which rows have sums; whether some must be rescaled
#pragma unroll
  for (uint32_t four = 0; four < kRowQuads; ++four) held[four] = to.row[four].sum != 0;
  softmax_weights_any(lane, x, scales, sum, to, w, shift);
#pragma unroll
  for (uint32_t i = 0; i < kBlocks * kRowQuads; ++i)
    any = any || (shift[i / kRowQuads][i % kRowQuads] != 0 && held[i % kRowQuads]);
  if (__any_sync(kAll, any) == 0) return;
#pragma unroll
  for (uint32_t i = 0; i < kBlocks * kRowQuads; ++i)
    rescale_sums(lane, i / kRowQuads, i % kRowQuads, shift[i / kRowQuads][i % kRowQuads], to);
}

// Scores in base 2 become weights. `first_block` is that of the warp's coordinates. `masked`: some
// slots may have no key. What their scales happen to be must not show, not even as another way to
// the same weights.
template <class Traits>
inline void softmax_weights_levels(const LaneWeights& lane, typename SpreadV<Traits>::Scores& x,
                                   const unsigned char* scales_at, uint32_t first_block,
                                   bool masked, LevelSums<Traits>& to) {
  constexpr uint32_t kKeys = Traits::kLaneKeys, kRowQuads = Traits::kRows / 4;
  constexpr uint32_t kBlocks = Traits::kWarpBlocksV;
  float scales[kBlocks][kKeys];
#pragma unroll
  for (uint32_t block = 0; block < kBlocks; ++block)
    load_scales<Traits, Traits::kBlocksV>(scales_at, first_block + block, scales[block]);
  // Over pages, where slots hold what other sequences left; a linear cache loads zeros there.
  if (Traits::kCluster == kDecodePages && masked) {
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      float max_score = x[0][i];
#pragma unroll
      for (uint32_t four = 1; four < kRowQuads; ++four) max_score = fmaxf(max_score, x[four][i]);
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block)
        if (max_score == minus_infinity()) scales[block][i] = 0;
    }
  }
  uint32_t w[kBlocks][kRowQuads][kKeys], all = 0;
  float sum[kRowQuads];
  bool usual = true;
#pragma unroll
  for (uint32_t four = 0; four < kRowQuads; ++four) {
    LevelRow& r = to.row[four];
    r.max = fmaxf(r.max, max_of(x[four]));
    float p[kKeys], stage_sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) p[i] = exp2_fast(x[four][i] - r.reference);
#pragma unroll
    for (uint32_t i = 0; i < kKeys; i += 2) stage_sum += p[i] + p[i + 1];
    sum[four] = r.sum + stage_sum;
    usual = usual && sum[four] < 0x1p64f;
#pragma unroll
    for (uint32_t i = 0; i < kBlocks * kKeys; ++i) {
      uint32_t& weight = w[i / kKeys][four][i % kKeys];
      const float scale = scales[i / kKeys][i % kKeys] * to.fixed[i / kKeys][four].scale;
      weight = to_integer(fmaf(p[i % kKeys], scale, lane.dither));
      all |= weight;
    }
  }
  if (__any_sync(kAll, all >= kTooLarge || !usual) != 0) {
    softmax_weights_rescaled(lane, x, scales, sum, to, w);
  } else {
#pragma unroll
    for (uint32_t four = 0; four < kRowQuads; ++four) to.row[four].sum = sum[four];
  }
#pragma unroll
  for (uint32_t i = 0; i < kBlocks * kRowQuads; ++i) {
    const uint32_t block = i / kRowQuads, four = i % kRowQuads;
    if constexpr (Traits::FormV::kBias != 0) {
#pragma unroll
      for (uint32_t key = 0; key < kKeys; ++key)
        to.fixed[block][four].weight_sum += w[block][four][key];
    }
#pragma unroll
    for (uint32_t mma = 0; mma < Traits::kMmas; ++mma)
      transpose_weights(lane, w[block][four] + mma * 4, to.weights[block][four][mma]);
  }
}

// A key adds up to 127 times 255 to a sum, and less than 2^16 to one lane's sum of weights. Sums
// are checked so often that rescale_sums, after at most halving them, has room in 32 bits; so has
// the sum of a row's eight lanes' weights.
constexpr uint32_t kStagesToCheck = 512;
static_assert(2 * int64_t{127 * 255 * 64} * kStagesToCheck + (1 << 24) + (1 << 15) < int64_t{1}
                                                                                         << 31);
template <class Traits>
inline void check_sums(const LaneWeights& lane, uint32_t four, LevelSums<Traits>& to) {
#pragma unroll
  for (uint32_t block = 0; block < to.kBlocks; ++block) {
    uint32_t all = 4 * (to.fixed[block][four].weight_sum - lane.surplus);
#pragma unroll
    for (uint32_t i = 0; i < to.kSums * 4; ++i) {
      if (to.block_of(i / 4) != block) continue;
      const int32_t x = to.sums[four][i / 4][i % 4];
      all |= static_cast<uint32_t>(x < 0 ? -x : x);
    }
    const uint32_t row_lanes = 0x11111111u << threadIdx.x % 4;
    if ((__ballot_sync(kAll, all >= 1u << 29) & row_lanes) == 0) continue;
    to.fixed[block][four].scale *= 0.5f;
    rescale_sums(lane, block, four, 1, to);
  }
}

inline float four_lanes_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}

// Scores in base 2 become probabilities. The reference, an integer, lies kHeadroom above the
// largest logit, so that sums of large bf16 values do not overflow.
template <int32_t kHeadroom, uint32_t kT, uint32_t kColumns>
inline void softmax_weights_float16(float (&x)[kT][2], FloatRow& row, float (&acc)[kColumns][4]) {
  float max = fmaxf(x[0][0], x[0][1]);
#pragma unroll
  for (uint32_t t = 1; t < kT; ++t) max = fmaxf(max, fmaxf(x[t][0], x[t][1]));
  row.max = fmaxf(row.max, four_lanes_max(max));
  // The difference is exact where a sum would be rounded.
  if (__any_sync(kAll, row.max - row.reference > kFarAbove - kHeadroom) != 0) {
    const float to = ceilf(fmaxf(row.max, kLowest)) + kHeadroom;
    const float rescale = exp2_fast(row.reference - to);
    row.reference = to;
    row.sum *= rescale;
    const float2 of = transpose_rows(rescale);
#pragma unroll
    for (uint32_t i = 0; i < kColumns * 4; ++i) acc[i / 4][i % 4] *= i % 2 == 0 ? of.x : of.y;
  }
#pragma unroll
  for (uint32_t t = 0; t < kT; ++t) {
    x[t][0] = exp2_fast(x[t][0] - row.reference), x[t][1] = exp2_fast(x[t][1] - row.reference);
    row.sum += x[t][0] + x[t][1];
  }
}

}  // namespace gyre::cuda
