// Loading and storing f32, f16 and bf16 as vectors of f32: loads are exact, stores round once.
// Every target writes the bits that Half and BFloat16 (gyre/dtype.h) write.

#if defined(GYRE_CPU_CONVERT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_CONVERT_INL_H
#undef GYRE_CPU_CONVERT_INL_H
#else
#define GYRE_CPU_CONVERT_INL_H
#endif

#include <cstdint>

#include "gyre/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef GYRE_HAS_F16_CONVERT
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_EMU128 || \
    HWY_TARGET == HWY_SCALAR
#define GYRE_HAS_F16_CONVERT 0  // Highway's own narrowing truncates here
#else
#define GYRE_HAS_F16_CONVERT 1
#endif

template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const float* p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const BFloat16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadF32(D d, const Half* p) {
#if GYRE_HAS_F16_CONVERT
  // Loaded as integers: for two lanes Highway 1.0 has two LoadU of float16_t where that is __fp16.
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> half;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::PromoteTo(d, hn::BitCast(half, bits));
#else
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFFu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(d32, 112u << 23));
  // Subnormal: 2^-14 plus the mantissa in its last places, less 2^-14, is exact.
  const auto biased = hn::BitCast(d, hn::Add(shifted, hn::Set(d32, 113u << 23)));
  const auto subnormal = hn::BitCast(d32, hn::Sub(biased, hn::Set(d, 0x1p-14f)));
  const auto special = hn::Or(shifted, hn::Set(d32, 0x7F800000u));
  const auto quiet = hn::Or(special, hn::Set(d32, 0x400000u));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x400u)), subnormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7BFFu)), special, result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7C00u)), quiet, result);
  return hn::BitCast(d, hn::Or(result, sign));
#endif
}

template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}

// The rounded value is in the upper half of each lane.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundToBF16(D /*d*/, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  return hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7FFFu)));
}

template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> v, BFloat16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto rounded = hn::ShiftRight<16>(RoundToBF16(d, v));
  const auto result = hn::IfThenElse(is_nan, hn::Set(d32, 0x7FC0u), rounded);
  hn::StoreU(hn::TruncateTo(d16, result), d16, reinterpret_cast<uint16_t*>(p));
}

#if GYRE_HAS_F16_CONVERT
// The hardware keeps a NaN's sign and payload.
template <class D16>
HWY_INLINE hn::Vec<D16> CanonicalNaN(D16 d16, hn::Vec<D16> half) {
  const hn::RebindToSigned<D16> di;
  const auto magnitude = hn::And(hn::BitCast(di, half), hn::Set(di, 0x7FFF));
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7C00));
  return hn::BitCast(d16, hn::IfThenElse(is_nan, hn::Set(di, 0x7E00), hn::BitCast(di, half)));
}

template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> NarrowToF16(D /*d*/, hn::Vec<D> v) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(d16, v));
}
#else
template <class D16>
HWY_INLINE hn::Vec<D16> CanonicalNaN(D16 /*d16*/, hn::Vec<D16> half) {
  return half;
}

template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> NarrowToF16(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFFFFFFu));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1u));
  const auto rebased =
      hn::Sub(hn::Add(magnitude, hn::Add(odd, hn::Set(d32, 0xFFFu))), hn::Set(d32, 0x38000000u));
  const auto normal = hn::ShiftRight<13>(rebased);
  const auto half = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(d32, half), hn::Set(d32, 0x3F000000u));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x38800000u)), subnormal, normal);
  result =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x477FFFFFu)), hn::Set(d32, 0x7C00u), result);
  result = hn::Or(result, sign);
  result =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7F800000u)), hn::Set(d32, 0x7E00u), result);
  return hn::TruncateTo(hn::Rebind<uint16_t, D>(), result);
}
#endif

template <class D>
HWY_INLINE void StoreF32(D d, hn::Vec<D> v, Half* p) {
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(CanonicalNaN(d16, NarrowToF16(d, v)), d16, reinterpret_cast<uint16_t*>(p));
}

// For long rows: two vectors to one full-width store, NaN as the hardware leaves it. Feed the
// inputs to NoteNaN and, if HasNaN in the end, store the row again with StoreF32.
template <class D>
HWY_INLINE void StoreTwoFast(D d, hn::Vec<D> v0, hn::Vec<D> v1, float* p) {
  hn::StoreU(v0, d, p);
  hn::StoreU(v1, d, p + hn::Lanes(d));
}

template <class D>
HWY_INLINE void StoreTwoFast(D d, hn::Vec<D> v0, hn::Vec<D> v1, Half* p) {
  const hn::Repartition<uint16_t, D> d16;
  hn::StoreU(hn::Combine(d16, NarrowToF16(d, v1), NarrowToF16(d, v0)), d16,
             reinterpret_cast<uint16_t*>(p));
}

template <class D>
HWY_INLINE void StoreTwoFast(D d, hn::Vec<D> v0, hn::Vec<D> v1, BFloat16* p) {
  const hn::Repartition<uint16_t, D> d16;
  const auto upper_halves = hn::ConcatOdd(d16, hn::BitCast(d16, RoundToBF16(d, v1)),
                                          hn::BitCast(d16, RoundToBF16(d, v0)));
  hn::StoreU(upper_halves, d16, reinterpret_cast<uint16_t*>(p));
}

// NaN once any input was NaN; infinities may make it NaN too, which only costs the second pass.
template <class V>
HWY_INLINE V NoteNaN(V v0, V v1, V note) {
#if HWY_ARCH_X86
  return hn::Add(hn::Add(v0, v1), note);  // a product could be subnormal, which is slow here
#else
  return hn::MulAdd(v0, v1, note);
#endif
}

template <class D>
HWY_INLINE bool HasNaN(D d, hn::Vec<D> note) {
  return !hn::AllFalse(d, hn::IsNaN(note));
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
