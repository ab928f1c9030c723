// The online softmax: base-2 exponentials, and the state of a row that blocks of logits, splits of
// the keys and sink tokens are merged into.

#if defined(GYRE_CPU_ATTENTION_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_SOFTMAX_INL_H
#undef GYRE_CPU_ATTENTION_SOFTMAX_INL_H
#else
#define GYRE_CPU_ATTENTION_SOFTMAX_INL_H
#endif

#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Eight lanes at most: head dims are multiples of 8.
using DF = hn::CappedTag<float, 8>;
using VF = hn::Vec<DF>;

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// 2^x for x <= 0, relative error below 5e-7; 0 below 2^-126, NaN stays NaN.
template <class V>
HWY_INLINE V Exp2(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  // Adding 1.5 * 2^23 leaves the nearest integer in the last bits; with the exponent's bias they
  // are, shifted, the power of two.
  const auto magic = hn::Set(d, 12582912.0f + 127.0f);
  // Not Max, which drops a NaN on some targets.
  const auto lowest = hn::Set(d, -127.0f);
  const auto bounded = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  const auto shifted = hn::Add(bounded, magic);
  const auto f = hn::Sub(bounded, hn::Sub(shifted, magic));
  auto y = hn::MulAdd(f, hn::Set(d, 0.00133336f), hn::Set(d, 0.00961813f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.0555041f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.240226507f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.693147181f));
  y = hn::MulAdd(f, y, hn::Set(d, 1.0f));
  return hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

// cap * tanh(x / cap).
template <class V>
HWY_INLINE V SoftCap(V x, V cap) {
  const hn::DFromV<V> d;
  const auto a = hn::Div(hn::Abs(x), cap), one = hn::Set(d, 1.0f);
  // tanh(a) = (1 - e) / (1 + e), e = exp(-2a); for small a that cancels, and two terms of the
  // series do.
  const auto e = Exp2(hn::Mul(a, hn::Set(d, -2 * kLog2E)));
  const auto large = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const auto small = hn::NegMulAdd(hn::Mul(a, hn::Mul(a, a)), hn::Set(d, 1.0f / 3), a);
  const auto t = hn::IfThenElse(hn::Lt(a, hn::Set(d, 0.04f)), small, large);
  return hn::CopySign(hn::Mul(t, cap), x);
}

inline float Exp2One(float x) { return x == kMinusInfinity ? 0.0f : std::exp2(x); }

// What two merged states' accumulated values are multiplied by before they are added.
struct MergeWeights {
  float own, other;
};

// A row's softmax so far: the largest base-2 logit, and the sum of 2^(logit - max).
struct SoftmaxState {
  float max = kMinusInfinity;
  float sum = 0;

  // What logits are subtracted from. Before a key was seen not -inf: -inf - -inf is NaN.
  float reference() const { return max == kMinusInfinity ? 0.0f : max; }

  // Raises max to `largest`; returns the factor that rescales values accumulated so far.
  float raise(float largest) {
    if (!(largest > max)) return 1.0f;
    const float rescale = Exp2One(max - largest);
    max = largest;
    sum *= rescale;
    return rescale;
  }

  MergeWeights merge(const SoftmaxState& other) {
    if (other.sum == 0) return {1.0f, 0.0f};  // no key was seen there
    const float own = raise(other.max);
    // Both maxima -inf and a sum that is not 0: the other's logits were all NaN, and so is its sum.
    const bool none = other.max == kMinusInfinity && max == kMinusInfinity;
    const float weight = none ? other.sum : Exp2One(other.max - max);
    sum += weight * other.sum;
    return {own, weight};
  }

  // Natural logarithm of the sum of exp(logit); -inf if no key was seen.
  float log_sum_exp() const { return sum == 0 ? kMinusInfinity : (max + std::log2(sum)) * kLn2; }
};

// Merges a block of `count` logits (a multiple of 8), each times `factor` > 0, into a row's state
// and makes them probabilities; -inf becomes next to nothing. Returns the rescale factor. The row
// has room for whole vectors of up to 16 lanes.
HWY_INLINE float FoldLogits(float* HWY_RESTRICT logits, uint32_t count, float factor,
                            SoftmaxState& state) {
  const hn::CappedTag<float, 16> d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  for (; count % lanes != 0; count += 8) {
    const DF eight;
    for (uint32_t i = 0; i < 8; i += static_cast<uint32_t>(hn::Lanes(eight)))
      hn::Store(hn::Set(eight, kMinusInfinity), eight, logits + count + i);
  }
  auto max_lanes = hn::Set(d, kMinusInfinity);
  for (uint32_t i = 0; i < count; i += lanes)
    max_lanes = hn::Max(max_lanes, hn::Load(d, logits + i));
  const float rescale = state.raise(hn::GetLane(hn::MaxOfLanes(d, max_lanes)) * factor);
  const auto reference = hn::Set(d, state.reference());
  const auto factors = hn::Set(d, factor);
  for (uint32_t i = 0; i < count; i += lanes) {
    // Not fused: the largest must come out as exactly 1.
    const auto p = Exp2(hn::Sub(hn::Mul(hn::Load(d, logits + i), factors), reference));
    hn::Store(p, d, logits + i);
  }
  // By eight: a window may begin at any tile of a block, and the sum must not depend on it.
  const DF eight;
  auto sum = hn::Zero(eight);
  for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(eight)))
    sum = hn::Add(sum, hn::Load(eight, logits + i));
  state.sum += hn::GetLane(hn::SumOfLanes(eight, sum));
  return rescale;
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
