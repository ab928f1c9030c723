// Transformed coordinates times a factor become codes, 16 at a time (native formats).

#if defined(GYRE_CPU_KV_CODES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_CODES_INL_H
#undef GYRE_CPU_KV_CODES_INL_H
#else
#define GYRE_CPU_KV_CODES_INL_H
#endif

#include <cstdint>

#include "abi/kv_codec.h"
#include "cpu/kernels/hadamard-inl.h"
#include "cpu/kernels/kv_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using VInt = hn::Vec<hn::RebindToSigned<DHadamard>>;
using DLevel = hn::CappedTag<int8_t, 16>;
using VLevel = hn::Vec<DLevel>;
using DInt16 = hn::CappedTag<int16_t, 8>;
using VInt16 = hn::Vec<DInt16>;

HWY_INLINE VInt CeilToInt(VHadamard v) {
#if HWY_ARCH_ARM_A64
  return VInt(vcvtpq_s32_f32(v.raw));  // Ceil and ConvertTo in one instruction
#else
  return hn::ConvertTo(hn::RebindToSigned<DHadamard>(), hn::Ceil(v));
#endif
}

// The lower 16 bits of the lanes of two vectors.
HWY_INLINE VInt16 LowerBits(VInt v0, VInt v1) {
  return hn::ConcatEven(DInt16(), hn::BitCast(DInt16(), v1), hn::BitCast(DInt16(), v0));
}

// Four vectors of integers within 16 bits to 16 saturated bytes.
HWY_INLINE VLevel NarrowToBytes(VInt v0, VInt v1, VInt v2, VInt v3) {
  const hn::Half<DLevel> half;
  return hn::Combine(DLevel(), hn::DemoteTo(half, LowerBits(v2, v3)),
                     hn::DemoteTo(half, LowerBits(v0, v1)));
}

// For v >= 0 within 12 bits: an integer, in the lower 16 bits of each lane, that is at least 2 t -
// 1 for exactly those integers t that are less than v. Rounding up and converting would occupy a
// pipe for twice as long as this addition, which rounds to multiples of 1/2: v = t lies on a tie
// that goes down to t - 1. Below 1 the result may be negative.
HWY_INLINE VInt RoundToHalf(VHadamard v) {
  const DHadamard d;
  return hn::BitCast(hn::RebindToSigned<DHadamard>(), hn::Add(v, hn::Set(d, 0x1p22f - 0.75f)));
}

// Four vectors of RoundToHalf to 16 saturated bytes: the largest integer less than v.
HWY_INLINE VCode NarrowBelow(VInt v0, VInt v1, VInt v2, VInt v3) {
  const auto low = LowerBits(v0, v1), high = LowerBits(v2, v3);
#if HWY_ARCH_ARM_A64
  return VCode(vqrshrun_high_n_s16(vqrshrun_n_s16(low.raw, 1), high.raw, 1));
#else
  const hn::Half<DCode> half;
  const auto one = hn::Set(DInt16(), int16_t{1});
  return hn::Combine(DCode(), hn::DemoteTo(half, hn::ShiftRight<1>(hn::Add(high, one))),
                     hn::DemoteTo(half, hn::ShiftRight<1>(hn::Add(low, one))));
#endif
}

// The upper bytes of four vectors of floats; sign in the top bit.
HWY_INLINE VCode TopBytes(VHadamard v0, VHadamard v1, VHadamard v2, VHadamard v3) {
  const hn::CappedTag<uint16_t, 8> d16;
  const DCode d8;
  const auto low = hn::ConcatOdd(d16, hn::BitCast(d16, v1), hn::BitCast(d16, v0));
  const auto high = hn::ConcatOdd(d16, hn::BitCast(d16, v3), hn::BitCast(d16, v2));
  return hn::ConcatOdd(d8, hn::BitCast(d8, high), hn::BitCast(d8, low));
}

using DSquares = hn::CappedTag<int32_t, 4>;
using VSquares = hn::Vec<DSquares>;

// Adds the squares of 32 levels, each within +-127, to four lanes.
HWY_INLINE VSquares AddSquares(VSquares total, VLevel level0, VLevel level1) {
#if HWY_ARCH_ARM_A64
  int16x8_t sum = vmull_s8(vget_low_s8(level0.raw), vget_low_s8(level0.raw));
  sum = vmlal_high_s8(sum, level0.raw, level0.raw);
  sum = vmlal_s8(sum, vget_low_s8(level1.raw), vget_low_s8(level1.raw));
  sum = vmlal_high_s8(sum, level1.raw, level1.raw);
  // At most 4 * 127^2: fits without a sign.
  const uint32x4_t wide = vpadalq_u16(vreinterpretq_u32_s32(total.raw), vreinterpretq_u16_s16(sum));
  return VSquares(vreinterpretq_s32_u32(wide));
#else
  const hn::CappedTag<int16_t, 8> d16;
  const hn::Half<DLevel> half;
  auto other = hn::Zero(DSquares());
  for (const VLevel level : {level0, level1}) {
    const auto low = hn::PromoteTo(d16, hn::LowerHalf(half, level));
    const auto high = hn::PromoteTo(d16, hn::UpperHalf(half, level));
    total = hn::ReorderWidenMulAccumulate(DSquares(), low, low, total, other);
    total = hn::ReorderWidenMulAccumulate(DSquares(), high, high, total, other);
  }
  return hn::Add(total, other);
#endif
}

// Magnitudes of 2 to 4-bit formats for a search in one step: a = ceil(2 |v|) - 1, and a / 16 picks
// a bucket; no bucket holds more than one threshold.
struct LevelTables {
  alignas(16) uint8_t first[16];      // index of the magnitude at the bucket's lower end
  alignas(16) uint8_t threshold[16];  // what a must exceed for the next, 255 if nothing
  alignas(16) uint8_t level[16];
};

template <uint32_t kCount>
constexpr LevelTables MakeLevelTables(const uint8_t (&levels)[kCount],
                                      const uint8_t (&thresholds)[kCount - 1]) {
  LevelTables tables{};
  for (uint32_t i = 0; i < kCount; ++i) tables.level[i] = levels[i];
  for (uint32_t bucket = 0; bucket < 16; ++bucket) {
    tables.threshold[bucket] = 255;
    for (const uint8_t threshold : thresholds) {
      const uint32_t least = threshold - 1u;
      if (least < 16 * bucket) ++tables.first[bucket];
      if (least >= 16 * bucket && least < 16 * bucket + 16)
        tables.threshold[bucket] = static_cast<uint8_t>(least);
    }
  }
  return tables;
}

inline constexpr LevelTables kTq2Tables = MakeLevelTables(abi::kTq2Levels, abi::kTq2Thresholds);
inline constexpr LevelTables kTq3Tables = MakeLevelTables(abi::kTq3Levels, abi::kTq3Thresholds);
inline constexpr LevelTables kTq4Tables = MakeLevelTables(abi::kTq4Levels, abi::kTq4Thresholds);

// Codes of a block: code(at, level) gives those of 16 coordinates and sets their levels, or the
// levels' magnitudes. Returns the sum of squared levels.
template <class Code>
HWY_INLINE int32_t EncodeBlock(const float* HWY_RESTRICT y, size_t n, uint8_t* HWY_RESTRICT codes,
                               const Code& code) {
  const DCode db;
  auto squares = hn::Zero(DSquares());
  VLevel level0, level1;
  for (size_t pair = 0; pair < n / 32; ++pair, y += 32, codes += 32) {
    const VCode codes0 = code(y, level0), codes1 = code(y + 16, level1);
    squares = AddSquares(squares, level0, level1);
    hn::StoreU(codes0, db, codes), hn::StoreU(codes1, db, codes + 16);
  }
  if (n % 32 != 0) {
    hn::StoreU(code(y, level0), db, codes);
    squares = AddSquares(squares, level0, hn::Zero(DLevel()));
  }
  return hn::GetLane(hn::SumOfLanes(DSquares(), squares));
}

// Sign and index of the nearest magnitude, a tie to the smaller one.
template <uint32_t kBits>
HWY_INLINE int32_t EncodeMagnitudes(const float* HWY_RESTRICT y, size_t n, float inverse,
                                    uint8_t* HWY_RESTRICT codes) {
  constexpr const LevelTables& kTables =
      kBits == 2 ? kTq2Tables : (kBits == 3 ? kTq3Tables : kTq4Tables);
  const DHadamard d;
  const DCode db;
  const auto factor = hn::Set(d, inverse);
  const auto first = hn::Load(db, kTables.first), threshold = hn::Load(db, kTables.threshold);
  const auto level = hn::Load(db, kTables.level);
  const auto round = [&](VHadamard v) HWY_ATTR { return RoundToHalf(hn::Mul(hn::Abs(v), factor)); };
  const auto code = [&](const float* at, VLevel& levels) HWY_ATTR {
    const auto v0 = hn::Load(d, at), v1 = hn::Load(d, at + 4), v2 = hn::Load(d, at + 8),
               v3 = hn::Load(d, at + 12);
    const auto a = NarrowBelow(round(v0), round(v1), round(v2), round(v3));
    const auto bucket = hn::ShiftRight<4>(a);
    const auto above = hn::VecFromMask(db, hn::Gt(a, hn::TableLookupBytes(threshold, bucket)));
    const auto index = hn::Sub(hn::TableLookupBytes(first, bucket), above);
    levels = hn::BitCast(DLevel(), hn::TableLookupBytes(level, index));
    const auto sign = hn::And(hn::ShiftRight<8 - kBits>(TopBytes(v0, v1, v2, v3)),
                              hn::Set(db, uint8_t{1 << (kBits - 1)}));
    return hn::Or(sign, index);
  };
  return EncodeBlock(y, n, codes, code);
}

// The nearest integer (odd ones below 8 bits), a tie to the lower one.
template <uint32_t kBits>
HWY_INLINE int32_t EncodeIntegers(const float* HWY_RESTRICT y, size_t n, float inverse,
                                  uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  const DLevel ds;
  const auto factor = hn::Set(d, inverse);
  const auto whole = [&](const float* at) HWY_ATTR {
    const auto v = hn::Mul(hn::Load(d, at), factor);
    return CeilToInt(kBits == 8 ? hn::Sub(v, hn::Set(d, 0.5f)) : v);
  };
  const auto code = [&](const float* at, VLevel& levels) HWY_ATTR {
    auto q = NarrowToBytes(whole(at), whole(at + 4), whole(at + 8), whole(at + 12));
    if constexpr (kBits == 8) {  // +-127 by the choice of the factor, rounding errors included
      levels = q;
    } else {
      constexpr int8_t kUpper = 1 << (kBits - 1);
      q = hn::Min(hn::Max(q, hn::Set(ds, int8_t{1 - kUpper})), hn::Set(ds, kUpper));
      levels = hn::Sub(hn::Add(q, q), hn::Set(ds, int8_t{1}));
      q = hn::Add(q, hn::Set(ds, int8_t{kUpper - 1}));
    }
    return hn::BitCast(DCode(), q);
  };
  return EncodeBlock(y, n, codes, code);
}

template <uint32_t kFormat>
HWY_INLINE int32_t EncodeFormat(const float* HWY_RESTRICT y, size_t n, float inverse,
                                uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_has_magnitudes(kFormat))
    return EncodeMagnitudes<kBits>(y, n, inverse, codes);
  if constexpr (!abi::kv_has_magnitudes(kFormat))
    return EncodeIntegers<kBits>(y, n, inverse, codes);
}

// Code of a coordinate that is zero, and its squared level.
template <uint32_t kFormat>
inline constexpr uint8_t kZeroCode = static_cast<uint8_t>(abi::kv_zero_code(kFormat));
template <uint32_t kFormat>
inline constexpr int32_t kZeroSquare =
    abi::kv_level(kFormat, kZeroCode<kFormat>) * abi::kv_level(kFormat, kZeroCode<kFormat>);

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
