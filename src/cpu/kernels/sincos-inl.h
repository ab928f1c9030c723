// Sine and cosine of an angle given as a signed 32-bit fraction of a turn.

#if defined(GYRE_CPU_SINCOS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_SINCOS_INL_H
#undef GYRE_CPU_SINCOS_INL_H
#else
#define GYRE_CPU_SINCOS_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The nearest quarter turn comes off exactly, in integers; what is left is at most an eighth of a
// turn, where the polynomials (least maximum error, fitted for f32) are within 7e-8 of the truth,
// rounding included.
template <class D, class DI = hn::RebindToSigned<D>>
HWY_INLINE void SinCosOfTurn(D d, hn::Vec<DI> turn, hn::Vec<D>& sine, hn::Vec<D>& cosine) {
  const DI di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, turn);
  const auto quarter = hn::ShiftRight<30>(hn::Add(bits, hn::Set(du, 0x20000000u)));
  const auto remainder = hn::BitCast(di, hn::Sub(bits, hn::ShiftLeft<30>(quarter)));
  const auto x = hn::Mul(hn::ConvertTo(d, remainder), hn::Set(d, 0x1.921fb6p-30f));  // 2 pi / 2^32
  const auto x2 = hn::Mul(x, x);
  auto s = hn::MulAdd(x2, hn::Set(d, -0x1.98da64p-13f), hn::Set(d, 0x1.1105b4p-7f));
  s = hn::MulAdd(x2, s, hn::Set(d, -0x1.555540p-3f));
  s = hn::MulAdd(hn::Mul(x, x2), s, x);
  auto c = hn::MulAdd(x2, hn::Set(d, 0x1.9a0258p-16f), hn::Set(d, -0x1.6c0c8cp-10f));
  c = hn::MulAdd(x2, c, hn::Set(d, 0x1.55554ap-5f));
  c = hn::MulAdd(x2, c, hn::Set(d, -0.5f));
  c = hn::MulAdd(x2, c, hn::Set(d, 1.0f));
  const auto odd = hn::RebindMask(d, hn::Ne(hn::And(quarter, hn::Set(du, 1u)), hn::Zero(du)));
  // Bit 1 of the quarter is the sign of the sine, bit 1 of the next quarter that of the cosine.
  const auto sine_sign = hn::ShiftLeft<31>(hn::ShiftRight<1>(quarter));
  const auto next = hn::Add(quarter, hn::Set(du, 1u));
  const auto cosine_sign = hn::ShiftLeft<31>(hn::ShiftRight<1>(next));
  sine = hn::Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sine_sign));
  cosine = hn::Xor(hn::IfThenElse(odd, s, c), hn::BitCast(d, cosine_sign));
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
