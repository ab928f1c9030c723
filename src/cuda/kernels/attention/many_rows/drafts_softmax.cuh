#pragma once
// Attention of draft tokens: a consumer thread's row of a group, from scores to weights, and the
// sums that the weights go to. A thread has of each tile of 8 columns two: 2 j and 2 j + 1. Weights
// are the 16-bit integers of weights.cuh, with the same rules for references and fixed-point
// scales. kTiles: tiles of the keys that the thread's warp has of a stage, all or one half of them.
#include "cuda/kernels/attention/common/fixed_point.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/many_rows/drafts_layout.cuh"

namespace gyre::cuda {

// Values that go with it are relative to the reference, a logit in base 2.
struct DraftRowState {
  float reference, sum;

  // 2^x of a difference of references, which is not positive, nor above: NaN is.
  static float power(float x) {
    return x < -126.0f ? 0.0f : power_of_two(static_cast<int32_t>(x < 0 ? x : 0.0f));
  }
  // Folds a later state; `rescale` and `part`: factors of the values.
  void fold(const DraftRowState& later, float& rescale, float& part) {
    const float to = fmaxf(reference, later.reference);
    rescale = power(reference - to), part = power(later.reference - to);
    sum = __fmaf_rn(later.sum, part, __fmul_rn(sum, rescale));  // NaN stays, whatever the factor
    reference = to;
  }
  SoftmaxState softmax() const {
    return {reference == kLowest ? minus_infinity() : reference, sum};
  }
};

template <class T>
class DraftSums {
 public:
  static constexpr uint32_t kVTiles = T::kVTiles;
  int32_t of_values[kVTiles][4] = {};  // PV: hi bytes of the weights, then lo

  static uint32_t lane_j() { return threadIdx.x % 4; }
  // The four lanes that share the thread's row.
  static uint32_t row_lanes() { return 15u << (threadIdx.x % kWarp / 4 * 4); }

  void begin_run(float factor) { factor_ = factor; }
  void begin_group() {
    reference_ = kLowest, sum_ = 0;
    fixed_ = FixedPoint::none();
    tiles_ = 0;
    until_check_ = kChecked;
    dither_ = (static_cast<float>(lane_j()) + 0.5f) * 0.0625f;
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 4; ++i) of_values[i / 4][i % 4] = 0;
  }

  // Scores of a stage, logits in base 2 over the row's factor, to A fragments of its weights, one
  // for each four tiles.
  template <uint32_t kTiles>
  void to_weights(const float (&x)[kTiles][2], const float2* v_scales, uint32_t (*a)[4]) {
    uint32_t w[kTiles][2];
    float sum;
    const uint32_t raised =
        __ballot_sync(kAll, softmax_weights<false>(x, v_scales, w, sum) ? 0 : 1);
    if (raised != 0) {
      raise_reference((raised & row_lanes()) != 0, x, v_scales);
      softmax_weights<true>(x, v_scales, w, sum);
    }
    sum_ = sum;
    if constexpr (T::FormV::kBias != 0) {
#pragma unroll
      for (uint32_t t = 0; t < kTiles; ++t) fixed_.weight_sum += w[t][0] + w[t][1];
    }
    tiles_ += kTiles;
    dither_ += dither_ < 0.0954915f ? 0.1545085f : -0.0954915f;
#pragma unroll
    for (uint32_t i = 0; i < kTiles / 2; ++i) {
      const uint32_t t = i * 2, first = permute(w[t][0], w[t][1], 0x5140),
                     last = permute(w[t + 1][0], w[t + 1][1], 0x5140);
      a[i / 2][i % 2 * 2] = permute(first, last, 0x7632);
      a[i / 2][i % 2 * 2 + 1] = permute(first, last, 0x5410);
    }
  }

  // Behind each stage. A key adds up to 127 times 255 to a sum. Sums are checked so often that
  // rescale_sums, after at most halving them, has room in 32 bits.
  void count_stage() {
    if (--until_check_ == 0) check_sums();
  }

  // The group's sums as floats, and its state.
  DraftRowState take(float (&v)[kVTiles][2]) const {
    using Form = typename T::FormV;
    constexpr float kUnit = 0x1p-31f;  // the bias of V's scales
    uint32_t weights = fixed_.weight_sum - surplus();
    float sum = sum_;
#pragma unroll
    for (int by = 1; by < 4; by *= 2) {
      weights += __shfl_xor_sync(kAll, weights, by);
      sum += __shfl_xor_sync(kAll, sum, by);
    }
    // What the bias adds, times the sum of weights, is subtracted while numbers are exact, or
    // small.
    const uint32_t upper = weights / 256 * Form::kBias;
    const float lower = static_cast<float>(weights % 256 * Form::kBias) * kUnit;
    const float inverse = inverse_scale(fixed_.scale);
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 2; ++i) {
      const int32_t hi = of_values[i / 2][i % 2], lo = of_values[i / 2][2 + i % 2];
      const auto below = static_cast<int32_t>(static_cast<uint32_t>(hi) * Form::kStep - upper);
      v[i / 2][i % 2] =
          __fmul_rn(__fmaf_rn(static_cast<float>(below), 256 * kUnit,
                              __fmaf_rn(static_cast<float>(lo), Form::kStep * kUnit, -lower)),
                    inverse);
    }
    return {reference_, sum};
  }

 private:
  // Probabilities relative to the reference, times V's scales, in fixed point. False: a weight does
  // not fit. `kCareful`: whatever the numbers are; the same bits where both are possible.
  template <bool kCareful, uint32_t kTiles>
  bool softmax_weights(const float (&x)[kTiles][2], const float2* v_scales,
                       uint32_t (&w)[kTiles][2], float& sum) const {
    const float factor = factor_, fixed = fixed_.scale;
    const float dithers[4] = {dither_, dither_ + 0.25f, dither_ + 0.5f, dither_ + 0.75f};
    uint32_t all = 0;
    float stage_sum = 0;
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const float2 scales = v_scales[t * 4];
      float p[2];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        p[e] = exp2_fast(fmaf(x[t][e], factor, -reference_));
        const float scale = (e == 0 ? scales.x : scales.y) * fixed,
                    dither = dithers[(t * 2 + e) % 4];
        w[t][e] = to_integer(fmaf(p[e], scale, dither));
        if constexpr (kCareful)
          w[t][e] = careful_weight(p[e], e == 0 ? scales.x : scales.y, dither);
        all |= w[t][e];
      }
      stage_sum += p[0] + p[1];
    }
    sum = sum_ + stage_sum;
    return all < kTooLarge && sum < 0x1p64f;
  }
  // The scale of a slot without a key may be NaN, or never written.
  uint32_t careful_weight(float p, float v_scale, float dither) const {
    const float fixed = fixed_.scale, scale = v_scale * fixed;
    if (p == 0 || is_nan(fixed)) return kIntegers;
    if (fixed == 0) return kIntegers + (p * v_scale == -minus_infinity() ? 1u : 0u);
    return to_integer(is_finite(scale) ? fmaf(p, scale, dither) : fmaf(p * v_scale, fixed, dither));
  }

  // Adapts a row's reference and fixed-point scale to a stage, and its sums to these. `raises`: the
  // thread's row is one that asks for it; others keep theirs, whatever their neighbours do.
  template <uint32_t kTiles>
  void raise_reference(bool raises, const float (&x)[kTiles][2], const float2* v_scales) {
    const float factor = factor_;
    // A lane's keys may all be hidden, where the sums over V are of all four lanes' keys.
    const bool held = (__ballot_sync(kAll, sum_ != 0 ? 1 : 0) & row_lanes()) != 0;
    float largest = minus_infinity();
#pragma unroll
    for (uint32_t i = 0; i < kTiles * 2; ++i) largest = fmaxf(largest, x[i / 2][i % 2]);
    largest = warp_max<4>(largest) * factor;
    uint32_t shift = 0;
    if (raises && largest - reference_ > kFarAbove - kReferenceHeadroom) {
      const float up = ceilf(fmaxf(largest, kLowest)) + kReferenceHeadroom;
      shift = static_cast<uint32_t>(fminf(up - reference_, 512.0f));
      sum_ = shift > 126 ? 0.0f : sum_ * power_of_two(-static_cast<int32_t>(shift));
      reference_ = up;
    }
    float max_weight = 0;
    bool known = true;
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const float2 scales = v_scales[t * 4];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float p = exp2_fast(fmaf(x[t][e], factor, -reference_));
        const float weight = p == 0 ? 0.0f : p * (e == 0 ? scales.x : scales.y);
        max_weight = fmaxf(max_weight, weight);
        known = known && !is_nan(weight);
      }
    }
    max_weight = warp_max<4>(max_weight);
    const bool unknown = (__ballot_sync(kAll, known ? 0 : 1) & row_lanes()) != 0;
    if (!raises) return;
    // A stage has so many keys that few of later ones have much larger weights.
    shift = rescale_weights(fixed_, max_weight, shift);
    if (unknown) fixed_.scale = __uint_as_float(0x7FC00000u);
    if (shift != 0 && held) rescale_sums(shift);
  }
  // What the bits of kIntegers add to the thread's sum of weights.
  uint32_t surplus() const { return tiles_ * 2 * kIntegers; }
  // Divides sums by 2^shift, to the nearest. The remainder of the hi bytes' sum goes to the lo
  // bytes'.
  void rescale_sums(uint32_t shift) {
    constexpr uint32_t kMax = 48, kStep = 16;  // 48 leave nothing of a sum; 16 fit in 32-bit sums
    auto weights = static_cast<int32_t>(fixed_.weight_sum - surplus());
#pragma unroll 1
    for (uint32_t left = shift < kMax ? shift : kMax; left != 0;) {
      const uint32_t by = left < kStep ? left : kStep;
      const int32_t half = 1 << (by - 1), mask = (1 << by) - 1;
#pragma unroll
      for (uint32_t i = 0; i < kVTiles * 2; ++i) {
        int32_t &hi = of_values[i / 2][i % 2], &lo = of_values[i / 2][2 + i % 2];
        lo = (lo + (hi & mask) * 256 + half) >> by;
        hi >>= by;
      }
      weights = (weights + half) >> by;
      left -= by;
    }
    fixed_.weight_sum = static_cast<uint32_t>(weights) + surplus();
  }
  static constexpr uint32_t kChecked = 256;
  static_assert(2 * int64_t{127 * 255 * kDraftKeys} * kChecked + (1 << 24) + (1 << 15) < int64_t{1}
                                                                                             << 31);
  void check_sums() {
    until_check_ = kChecked;
    uint32_t all = 4 * (fixed_.weight_sum - surplus());
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 4; ++i) {
      const int32_t x = of_values[i / 4][i % 4];
      all |= static_cast<uint32_t>(x < 0 ? -x : x);
    }
    if ((__ballot_sync(kAll, all >= 1u << 29 ? 1 : 0) & row_lanes()) == 0) return;
    fixed_.scale *= 0.5f;
    rescale_sums(1);
  }

  float factor_ = 0;  // of the row's scores
  float reference_ = 0, sum_ = 0, dither_ = 0;
  FixedPoint fixed_ = {};
  uint32_t tiles_ = 0, until_check_ = 0;
};

}  // namespace gyre::cuda
