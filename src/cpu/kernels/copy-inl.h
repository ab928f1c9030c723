// Copying a row of contiguous values: bit for bit within a dtype, with one rounding between dtypes.

#if defined(GYRE_CPU_COPY_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_COPY_INL_H
#undef GYRE_CPU_COPY_INL_H
#else
#define GYRE_CPU_COPY_INL_H
#endif

#include <cstddef>
#include <cstdint>

#include "cpu/kernel.h"
#include "cpu/kernels/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

template <class T>
struct BitsOf {
  using Type = uint16_t;
};
template <>
struct BitsOf<float> {
  using Type = uint32_t;
};

// Same type: bits, so that no NaN changes.
template <class T>
HWY_INLINE void CopyRow(const T* HWY_RESTRICT source, T* HWY_RESTRICT target, size_t count) {
  using Bits = typename BitsOf<T>::Type;
  const hn::ScalableTag<Bits> d;
  const size_t lanes = hn::Lanes(d);
  const auto* from = reinterpret_cast<const Bits*>(source);
  auto* to = reinterpret_cast<Bits*>(target);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto v0 = hn::LoadU(d, from + i);
    const auto v1 = hn::LoadU(d, from + i + lanes);
    const auto v2 = hn::LoadU(d, from + i + 2 * lanes);
    const auto v3 = hn::LoadU(d, from + i + 3 * lanes);
    hn::StoreU(v0, d, to + i);
    hn::StoreU(v1, d, to + i + lanes);
    hn::StoreU(v2, d, to + i + 2 * lanes);
    hn::StoreU(v3, d, to + i + 3 * lanes);
  }
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = from[i];
}

template <class Source, class Target>
HWY_INLINE void ConvertTail(const Source* HWY_RESTRICT source, Target* HWY_RESTRICT target,
                            size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) StoreF32(d, LoadF32(d, source + i), target + i);
  for (; i < count; ++i) target[i] = static_cast<Target>(static_cast<float>(source[i]));
}

template <class Source, class Target>
HWY_INLINE void CopyRow(const Source* HWY_RESTRICT source, Target* HWY_RESTRICT target,
                        size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto note0 = hn::Zero(d);
  auto note1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto v0 = LoadF32(d, source + i);
    const auto v1 = LoadF32(d, source + i + lanes);
    const auto v2 = LoadF32(d, source + i + 2 * lanes);
    const auto v3 = LoadF32(d, source + i + 3 * lanes);
    StoreTwoFast(d, v0, v1, target + i);
    StoreTwoFast(d, v2, v3, target + i + 2 * lanes);
    note0 = NoteNaN(v0, v1, note0);
    note1 = NoteNaN(v2, v3, note1);
  }
  constexpr bool kWidens = sizeof(Target) == sizeof(float);
  const bool again = !kWidens && HasNaN(d, hn::Add(note0, note1));
  const size_t from = HWY_UNLIKELY(again) ? 0 : i;
  ConvertTail(source + from, target + from, count - from);
}

// Rows of a dtype that is known at run time: a branch per row costs nothing, and the code around it
// exists once instead of once per dtype.
HWY_NOINLINE inline void RowToF32(uint64_t source, DType dtype, float* HWY_RESTRICT target,
                                  size_t count) {
  if (dtype == DType::f32) return CopyRow(pointer<const float>(source), target, count);
  if (dtype == DType::f16) return CopyRow(pointer<const Half>(source), target, count);
  CopyRow(pointer<const BFloat16>(source), target, count);
}
HWY_NOINLINE inline void RowFromF32(const float* HWY_RESTRICT source, uint64_t target, DType dtype,
                                    size_t count) {
  if (dtype == DType::f32) return CopyRow(source, pointer<float>(target), count);
  if (dtype == DType::f16) return CopyRow(source, pointer<Half>(target), count);
  CopyRow(source, pointer<BFloat16>(target), count);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
