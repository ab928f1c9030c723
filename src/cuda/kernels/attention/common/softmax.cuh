#pragma once
// The online softmax in base 2: a row's state and its merge, and the end of a row.
#include "cuda/kernels/attention/common/float_bits.cuh"
#include "cuda/kernels/instructions.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

// cap tanh(x / cap); two terms of the series where 1 - e cancels.
inline float soft_cap(float x, float cap) {
  const float a = fabsf(x) / cap, e = exp2_fast(a * (-2 * kLog2E));
  const float t = a < 0.04f ? a - a * a * a * (1.0f / 3) : (1.0f - e) / (1.0f + e);
  return copysignf(t * cap, x);
}

inline float exp2_one(float x) { return x == minus_infinity() ? 0.0f : exp2f(x); }

// Reductions over kLanes neighbouring lanes, a power of two.
template <int kLanes = kWarp>
inline float warp_max(float x) {
  static_assert((kLanes & (kLanes - 1)) == 0);
  for (int by = kLanes / 2; by != 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, by));
  return x;
}
template <int kLanes = kWarp>
inline float warp_sum(float x) {
  for (int by = kLanes / 2; by != 0; by /= 2) x += __shfl_xor_sync(kAll, x, by);
  return x;
}

// Largest logit of a row so far, and the sum of its probabilities relative to that.
struct SoftmaxState {
  float max, sum;

  static SoftmaxState none() { return {minus_infinity(), 0}; }

  // What probabilities are relative to. A row that saw nothing is relative to 0: -inf less -inf
  // would be NaN.
  static float reference(float max) { return max == minus_infinity() ? 0.0f : max; }

  // Factors of the values that go with a state: of those so far, and of the part's.
  struct Factors {
    float rescale, part;

    float fold(float so_far, float value) const {
      return fma_weighted(value, part, fma_weighted(so_far, rescale, 0.0f));
    }
  };
  // Folds the state of later keys.
  Factors fold(const SoftmaxState& later) {
    const float to = fmaxf(max, later.max);
    const Factors f = {sum == 0 ? 0.0f : exp2_fast(max - to),
                       later.sum == 0 ? 0.0f : exp2_fast(later.max - to)};
    *this = {to, __fmaf_rn(later.sum, f.part, __fmul_rn(sum, f.rescale))};
    return f;
  }
  // Merges one part per lane, of kLanes neighbouring lanes, into the state that all of them hold
  // alike. The part's sum and values are relative to part_reference. In two steps, so that the
  // factors can be used before the sums are there.
  template <int kLanes>
  Factors merge_max(float part_max, float part_reference) {
    const float largest = fmaxf(max, warp_max<kLanes>(part_max)), to = reference(largest);
    const Factors f = {exp2_fast(max - to), exp2_fast(part_reference - to)};
    *this = {largest, sum * f.rescale};
    return f;
  }
  template <int kLanes>
  void merge_sum(float part_sum, const Factors& f) {
    sum += warp_sum<kLanes>(part_sum * f.part);
  }
  template <int kLanes>
  Factors merge(const SoftmaxState& part, float part_reference) {
    const Factors f = merge_max<kLanes>(part.max, part_reference);
    merge_sum<kLanes>(part.sum, f);
    return f;
  }
  template <int kLanes>
  Factors merge(const SoftmaxState& part) {
    return merge<kLanes>(part, part.max);
  }
};

// The sink's logit of a head, if there are sink logits. Loaded in a way that the compiler does not
// know: it would spend minutes on aliases.
inline float sink_logit(uint64_t sink_logits, uint64_t head) {
  if (sink_logits == 0) return minus_infinity();
  return __uint_as_float(load_bits(sink_logits, static_cast<uint32_t>(head), true));
}

// A sink is one more logit, whose value is 0. Returns the factor of the row's values: 1 / sum.
// -inf: no sink.
inline float finish_row(SoftmaxState& state, float sink) {
  constexpr float kMax = 3.402823466e38f;
  float rescale = 1.0f;
  if (is_finite(sink)) sink = fminf(fmaxf(sink * kLog2E, -kMax), kMax);
  if (sink != minus_infinity()) {
    if (sink > state.max) {
      rescale = exp2_one(state.max - sink);
      state.sum *= rescale;
      state.max = sink;
    }
    state.sum += is_nan(sink) ? sink : exp2_one(sink - state.max);
  }
  return state.sum == 0 ? 0.0f : rescale / state.sum;
}

inline float log_sum_exp(const SoftmaxState& state) {
  return state.sum == 0 ? minus_infinity() : (state.max + log2f(state.sum)) * kLn2;
}

// Largest of a row's eight lanes, of several rows at once: their shuffles overlap.
template <uint32_t kCount>
inline void eight_lanes_max(float (&x)[kCount]) {
#pragma unroll
  for (int by = 4; by < 32; by *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] = fmaxf(x[i], __shfl_xor_sync(kAll, x[i], by));
  }
}
inline float eight_lanes_max(float x) {
  float one[1] = {x};
  eight_lanes_max(one);
  return one[0];
}

template <uint32_t kCount>
inline float max_of(const float (&x)[kCount]) {
  float largest = x[0];
#pragma unroll
  for (uint32_t i = 1; i < kCount; ++i) largest = fmaxf(largest, x[i]);
  return largest;
}

// soft_cap to 2 ulp, without the branches of a division; `inverse`: 1 / cap.
inline float soft_cap_fast(float x, float cap, float inverse) {
  const float a = fabsf(x) * inverse, e = exp2_fast(a * (-2 * kLog2E));
  const float t = a < 0.04f ? a - a * a * a * (1.0f / 3) : divide_fast(1.0f - e, 1.0f + e);
  return copysignf(t * cap, x);
}

// A score as a logit in base 2, of a call with a soft cap or slopes. `cap` 0: none; `inverse`: 1 /
// cap. `slope`: of ALiBi, in base 2; `distance`: from the query to the key.
inline float soft_logit(float score, float cap, float inverse, float slope, int32_t distance) {
  if (cap > 0) score = soft_cap_fast(score, cap, inverse) * kLog2E;
  return slope == 0 ? score : fmaf(slope, static_cast<float>(distance), score);
}

}  // namespace gyre::cuda
