// The online softmax: base-2 exponentials, and the state of a row {max, sum} that blocks of logits
// are folded into.

#if defined(GYRE_CPU_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_SOFTMAX_INL_H
#undef GYRE_CPU_SOFTMAX_INL_H
#else
#define GYRE_CPU_SOFTMAX_INL_H
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

// 2^x for x <= 0, relative error below 5e-6; below 2^-126 some number below 2^-126, NaN stays NaN.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  // Adding 1.5 * 2^23 leaves the nearest integer in the last bits.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto bounded = hn::Max(hn::Set(d, -127.0f), x);  // in this order a NaN passes on x86, too
  const auto shifted = hn::Add(bounded, magic);
  const auto f = hn::Sub(bounded, hn::Sub(shifted, magic));
  auto y = hn::MulAdd(f, hn::Set(d, 0.00957f), hn::Set(d, 0.05589f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.240229f));
  y = hn::MulAdd(f, y, hn::Set(d, 0.693130f));
  y = hn::MulAdd(f, y, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, y), exponent));
}

// cap * tanh(x / cap).
HWY_INLINE VF SoftCap(VF x, VF cap, VF inverse) {
  const DF d;
  const auto a = hn::Mul(hn::Abs(x), inverse);
  // tanh(a) = (1 - e) / (1 + e), e = exp(-2a).
  const auto e = Exp2(hn::Mul(a, hn::Set(d, -2 * kLog2E)));
  const auto one = hn::Set(d, 1.0f);
  const auto t = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  return hn::CopySign(hn::Mul(t, cap), x);
}

inline float Exp2One(float x) { return x == kMinusInfinity ? 0.0f : std::exp2(x); }

// Base-2 logits: max and sum are of 2^logit.
struct RowState {
  float max = kMinusInfinity;
  float sum = 0;
};

// Folds `count` logits (a multiple of 8), each times `factor`, which is positive, into the state
// and makes them probabilities; what is -inf becomes next to nothing. Returns what the old
// accumulator is multiplied with.
HWY_INLINE float FoldLogits(float* HWY_RESTRICT logits, uint32_t count, float factor,
                            RowState& state) {
  const DF d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  auto top = hn::Set(d, kMinusInfinity);
  for (uint32_t i = 0; i < count; i += lanes) top = hn::Max(top, hn::Load(d, logits + i));
  const float largest = hn::GetLane(hn::MaxOfLanes(d, top)) * factor;
  float keep = 1.0f;
  if (largest > state.max) {
    keep = Exp2One(state.max - largest);
    state.max = largest;
  }
  // Before anything is seen, -inf less -inf must not appear.
  const auto max = hn::Set(d, state.max == kMinusInfinity ? 0.0f : state.max);
  const auto factors = hn::Set(d, factor);
  auto sum = hn::Zero(d);
  for (uint32_t i = 0; i < count; i += lanes) {
    const auto p = Exp2(hn::MulSub(hn::Load(d, logits + i), factors, max));
    hn::Store(p, d, logits + i);
    sum = hn::Add(sum, p);
  }
  const float added = hn::GetLane(hn::SumOfLanes(d, sum));
  // A row that sees nothing yet has the sum 0, unless a NaN must show.
  state.sum = state.max == kMinusInfinity && added < 1.0f ? 0.0f : state.sum * keep + added;
  return keep;
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
