// From a head's coordinates to codes and scales (native formats). The steps and their order are
// docs/kv_formats.md's.

#if defined(GYRE_CPU_KV_ENCODE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_ENCODE_INL_H
#undef GYRE_CPU_KV_ENCODE_INL_H
#else
#define GYRE_CPU_KV_ENCODE_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "abi/kv_codec.h"
#include "cpu/kernels/convert-inl.h"
#include "cpu/kernels/hadamard-inl.h"
#include "cpu/kernels/kv_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// A row on its way: transformed coordinates, then codes, one byte each. Both are transposed in
// groups of 16.
struct KvRow {
  alignas(64) float y[abi::kKvMaxHeadDim + 8];
  alignas(64) uint8_t codes[abi::kKvMaxHeadDim + 64];
};

// What is known of the scale blocks of a tile's rows, slot by slot: the steps from sums to scales
// take four slots at a time.
struct KvFacts {
  alignas(16) float sums[abi::kKvMaxScales][abi::kKvTile][4];     // of squares, by lane
  alignas(16) float largest[abi::kKvMaxScales][abi::kKvTile][4];  // square, by lane
  alignas(16) float sum[abi::kKvMaxScales][abi::kKvTile];
  alignas(16) float factor[abi::kKvMaxScales][abi::kKvTile];
  alignas(16) int32_t squares[abi::kKvMaxScales][abi::kKvTile];  // sum of squared levels
  alignas(16) uint16_t scales[abi::kKvMaxScales][abi::kKvTile];
  uint32_t extreme;  // slots with squares that leave the range of f32

  // Slots without a row are computed with the others; what they start from is zeros.
  void Clear(size_t count) {
    std::memset(sums, 0, count * sizeof(sums[0]));
    std::memset(largest, 0, count * sizeof(largest[0]));
    std::memset(squares, 0, count * sizeof(squares[0]));
  }
};

// The last stages of a scale block: kRadix / 2 outer ones that were left, then 1 and 2. Coordinates
// stay transposed in groups of 16. The sum of squares, product and sum rounded apart: lane l of a
// group is (y[4l]^2 + y[4l+2]^2) + (y[4l+1]^2 + y[4l+3]^2); the groups of each quarter of the block
// (at least a group) are added in order, then the quarters, (0 + 2) + (1 + 3), then the lanes
// likewise: those are left to FindFactors.
template <bool kLargest, uint32_t kRadix>
HWY_INLINE void FinishBlock(float* HWY_RESTRICT y, size_t n, float* HWY_RESTRICT sums,
                            float* HWY_RESTRICT largest_lanes) {
  const DHadamard d;
  VHadamard quarters[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  auto largest = hn::Zero(d);
  const size_t h = n / kRadix;
  const size_t quarter = std::max<size_t>(n / 4, 16);
  const auto finish = [&](float* at, VHadamard v0, VHadamard v1, VHadamard v2, VHadamard v3,
                          VHadamard& sum) HWY_ATTR {
    HadamardLast16(v0, v1, v2, v3);
    hn::Store(v0, d, at), hn::Store(v1, d, at + 4), hn::Store(v2, d, at + 8),
        hn::Store(v3, d, at + 12);
    v0 = hn::Mul(v0, v0), v1 = hn::Mul(v1, v1), v2 = hn::Mul(v2, v2), v3 = hn::Mul(v3, v3);
    if constexpr (kLargest) largest = hn::Max(largest, hn::Max(hn::Max(v0, v1), hn::Max(v2, v3)));
    sum = hn::Add(sum, hn::Add(hn::Add(v0, v2), hn::Add(v1, v3)));
  };
  if constexpr (kRadix == 4) {
    for (float* at = y; at != y + h; at += 16) {
      VHadamard v[4][4];
      for (size_t j = 0; j < 4; ++j) {
        for (size_t r = 0; r < 4; ++r) v[r][j] = hn::Load(d, at + r * h + 4 * j);
        Butterfly(v[0][j], v[1][j]), Butterfly(v[2][j], v[3][j]);
        Butterfly(v[0][j], v[2][j]), Butterfly(v[1][j], v[3][j]);
      }
      for (size_t r = 0; r < 4; ++r)
        finish(at + r * h, v[r][0], v[r][1], v[r][2], v[r][3], quarters[r]);
    }
  } else {
    static_assert(kRadix == 1);
    for (size_t i = 0; i < n; i += 16) {
      finish(y + i, hn::Load(d, y + i), hn::Load(d, y + i + 4), hn::Load(d, y + i + 8),
             hn::Load(d, y + i + 12), quarters[i / quarter]);
    }
  }
  hn::Store(hn::Add(hn::Add(quarters[0], quarters[2]), hn::Add(quarters[1], quarters[3])), d, sums);
  if constexpr (kLargest) hn::Store(largest, d, largest_lanes);
}

HWY_INLINE hn::Vec<hn::RebindToSigned<DHadamard>> CeilToInt(VHadamard v) {
#if HWY_ARCH_ARM_A64
  return hn::Vec<hn::RebindToSigned<DHadamard>>(vcvtpq_s32_f32(v.raw));  // one instruction for two
#else
  return hn::ConvertTo(hn::RebindToSigned<DHadamard>(), hn::Ceil(v));
#endif
}

using VInt = hn::Vec<hn::RebindToSigned<DHadamard>>;

using DLevel = hn::CappedTag<int8_t, 16>;
using VLevel = hn::Vec<DLevel>;
using DInt16 = hn::CappedTag<int16_t, 8>;
using VInt16 = hn::Vec<DInt16>;

// The lower halves of two vectors.
HWY_INLINE VInt16 LowerHalves(VInt v0, VInt v1) {
  return hn::ConcatEven(DInt16(), hn::BitCast(DInt16(), v1), hn::BitCast(DInt16(), v0));
}

// Four vectors of integers within 16 bits to 16 saturated bytes.
HWY_INLINE VLevel NarrowToBytes(VInt v0, VInt v1, VInt v2, VInt v3) {
  const hn::Half<DLevel> half;
  return hn::Combine(DLevel(), hn::DemoteTo(half, LowerHalves(v2, v3)),
                     hn::DemoteTo(half, LowerHalves(v0, v1)));
}

// For v >= 0 within 12 bits: an integer, in the lower half of each lane, that is at least 2 t - 1
// for just those integers t that are less than v. A conversion rounding up would take a pipe twice
// as long as this sum, which counts halves: v = t falls on a tie that goes down to t - 1, an even
// number of halves. Below 1 the result may be negative.
HWY_INLINE VInt CountHalves(VHadamard v) {
  const DHadamard d;
  return hn::BitCast(hn::RebindToSigned<DHadamard>(), hn::Add(v, hn::Set(d, 0x1p22f - 0.75f)));
}

// From CountHalves, four vectors, to 16 saturated bytes: the largest integer less than v.
HWY_INLINE VCode NarrowHalves(VInt v0, VInt v1, VInt v2, VInt v3) {
  const auto low = LowerHalves(v0, v1), high = LowerHalves(v2, v3);
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

// Magnitude tables of 2 to 4-bit formats in the form the coder uses: a = ceil(2 |v|) - 1, and a /
// 16 picks a bucket; no bucket holds more than one threshold.
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

// Codes of a block: code(at, level) gives those of 16 coordinates, and their levels or the levels'
// magnitudes. Returns the sum of squared levels.
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

// 2 to 4 bits: sign and index of the nearest magnitude, a tie to the smaller one.
template <uint32_t kBits>
HWY_INLINE int32_t EncodeLevels(const float* HWY_RESTRICT y, size_t n, float inverse,
                                uint8_t* HWY_RESTRICT codes) {
  constexpr const LevelTables& kTables =
      kBits == 2 ? kTq2Tables : (kBits == 3 ? kTq3Tables : kTq4Tables);
  const DHadamard d;
  const DCode db;
  const auto factor = hn::Set(d, inverse);
  const auto first = hn::Load(db, kTables.first), threshold = hn::Load(db, kTables.threshold);
  const auto level = hn::Load(db, kTables.level);
  const auto halves = [&](VHadamard v)
                          HWY_ATTR { return CountHalves(hn::Mul(hn::Abs(v), factor)); };
  const auto code = [&](const float* at, VLevel& levels) HWY_ATTR {
    const auto v0 = hn::Load(d, at), v1 = hn::Load(d, at + 4), v2 = hn::Load(d, at + 8),
               v3 = hn::Load(d, at + 12);
    const auto a = NarrowHalves(halves(v0), halves(v1), halves(v2), halves(v3));
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

// 5, 6 and 8 bits: the nearest integer (odd ones below 8 bits), a tie to the lower one.
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
      constexpr int8_t kTop = 1 << (kBits - 1);
      q = hn::Min(hn::Max(q, hn::Set(ds, int8_t{1 - kTop})), hn::Set(ds, kTop));
      levels = hn::Sub(hn::Add(q, q), hn::Set(ds, int8_t{1}));
      q = hn::Add(q, hn::Set(ds, int8_t{kTop - 1}));
    }
    return hn::BitCast(DCode(), q);
  };
  return EncodeBlock(y, n, codes, code);
}

// Code of a coordinate that is zero, and its squared level.
template <uint32_t kBits>
inline constexpr uint8_t kZeroCode = kBits == 5 || kBits == 6 ? 1 << (kBits - 1) : 0;
template <uint32_t kFormat>
inline constexpr int32_t kZeroSquare = abi::kv_level(kFormat, kZeroCode<abi::kv_bits(kFormat)>) *
                                       abi::kv_level(kFormat, kZeroCode<abi::kv_bits(kFormat)>);

// The work on a row falls into steps, each done for all rows of a tile before the next: divisions
// and square roots are then taken for four rows at once.
struct KvHead {
  abi::KvBlocks blocks;
  abi::KvScaleBlocks scales;

  float stretch;                          // 1, or what V's scales are multiplied by
  float inverse_size[abi::kKvMaxScales];  // powers of two: exact
  float inverse_transform[abi::kKvMaxScales];
  bool ends_block[abi::kKvMaxScales];  // the last of its transform block

  KvHead(uint32_t head_dim, float scale_stretch)
      : blocks(abi::kv_blocks(head_dim)),
        scales(abi::kv_scale_blocks(head_dim)),
        stretch(scale_stretch) {
    for (uint32_t i = 0; i < scales.count; ++i) {
      inverse_size[i] = 1.0f / static_cast<float>(scales.size[i]);
      inverse_transform[i] = 1.0f / static_cast<float>(scales.transform[i]);
      ends_block[i] = i + 1 == scales.count || scales.transform[i] <= abi::kKvScaleBlock ||
                      scales.transform[i] != scales.transform[i + 1];
    }
  }
};

constexpr uint32_t kCommonBlock = 128;  // gets loops of its own

// Transforms the coordinates of a row. first(i, a, b) gives the eight from i on, with signs
// applied, after the stage 4. A last block of 8 has room for 16.
template <uint32_t kFormat, class First>
HWY_INLINE void TransformRow(const KvHead& head, const First& first, uint32_t slot, float* y,
                             KvFacts& facts) {
  constexpr bool kLargest = abi::kv_bits(kFormat) > 4;
  uint32_t scale = 0;
  for (uint32_t b = 0; b < head.blocks.count; ++b) {
    const size_t begin = head.blocks.begin[b], n = head.blocks.size[b];
    float* const block = y + begin;
    const auto from_begin = [&](size_t i, VHadamard& v0, VHadamard& v1)
                                HWY_ATTR { first(begin + i, v0, v1); };
    if (n == kCommonBlock) {  // the last four stages in one pass
      HadamardOuter(from_begin, block, kCommonBlock, kCommonBlock / 4);
      FinishBlock<kLargest, 4>(block, kCommonBlock, facts.sums[scale][slot],
                               facts.largest[scale][slot]);
      ++scale;
      continue;
    }
    HadamardOuter(from_begin, block, n, n);
    if (n < 16) std::fill_n(block + n, 16 - n, 0.0f);  // zeros stay zeros in the last two stages
    const size_t size = std::min<size_t>(n, abi::kKvScaleBlock);
    for (size_t part = 0; part < n; part += size, ++scale) {
      FinishBlock<kLargest, 1>(block + part, std::max<size_t>(size, 16), facts.sums[scale][slot],
                               facts.largest[scale][slot]);
    }
  }
}

// Lane by lane of four slots to slot by slot.
HWY_INLINE void LoadSlots(const float (*lanes)[4], VHadamard (&v)[4]) {
  for (size_t i = 0; i < 4; ++i) v[i] = hn::Load(DHadamard(), lanes[i]);
  Transpose4(v[0], v[1], v[2], v[3]);
}

template <uint32_t kBits>
inline constexpr float kGain = kBits == 2   ? abi::kTq2Gain
                               : kBits == 3 ? abi::kTq3Gain
                               : kBits == 4 ? abi::kTq4Gain
                               : kBits == 8 ? 127.0f
                                            : static_cast<float>(1 << (kBits - 1));

template <uint32_t kFormat>
HWY_INLINE void FindFactors(const KvHead& head, KvFacts& facts) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  const DHadamard d;
  facts.extreme = 0;
  for (uint32_t slot = 0; slot < abi::kKvTile; slot += 4) {
    auto block_sum = hn::Zero(d);
    for (uint32_t i = 0; i < head.scales.count; ++i) {
      VHadamard v[4];
      LoadSlots(facts.sums[i] + slot, v);
      const auto sum = hn::Add(hn::Add(v[0], v[2]), hn::Add(v[1], v[3]));
      hn::Store(sum, d, facts.sum[i] + slot);
      block_sum = hn::Add(block_sum, sum);
      if (head.ends_block[i]) {
        const auto in_range = hn::And(hn::Ge(block_sum, hn::Set(d, 0x1p-80f)),
                                      hn::Le(block_sum, hn::Set(d, 0x1p120f)));
        uint8_t bits[8] = {};
        hn::StoreMaskBits(d, hn::Not(in_range), bits);
        facts.extreme |= uint32_t{bits[0]} << slot;
        block_sum = hn::Zero(d);
      }
      auto square = hn::Mul(sum, hn::Set(d, head.inverse_size[i]));
      if constexpr (kBits > 4) {
        // The root of a rounded square is exactly what was squared, if the square is normal.
        LoadSlots(facts.largest[i] + slot, v);
        square = hn::Max(hn::Max(v[0], v[2]), hn::Max(v[1], v[3]));
      }
      hn::Store(hn::Div(hn::Set(d, kGain<kBits>), hn::Sqrt(square)), d, facts.factor[i] + slot);
    }
  }
}

// The factor of a block so small that its squares lose bits: part of a large transform block.
template <uint32_t kBits>
inline float FactorOfSmall(const float* y, uint32_t n, float factor) {
  if constexpr (kBits <= 4) return factor;
  float largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(y[i]));
  return kGain<kBits> / largest;
}

template <uint32_t kFormat>
HWY_INLINE void CodeRow(const KvHead& head, uint32_t slot, KvRow& row, KvFacts& facts) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    const uint32_t n = head.scales.size[i], padded = std::max(n, 16u);
    const float* const y = row.y + head.scales.begin[i];
    uint8_t* const codes = row.codes + head.scales.begin[i];
    const float sum = facts.sum[i][slot];
    float factor = facts.factor[i][slot];
    if (HWY_UNLIKELY(sum < 0x1p-90f)) {
      if (sum == 0) {
        std::fill_n(codes, padded, kZeroCode<kBits>);
        facts.squares[i][slot] = 1;
        continue;
      }
      factor = FactorOfSmall<kBits>(y, padded, factor);
    }
    const auto encode = [&](size_t count) HWY_ATTR {
      if constexpr (kBits <= 4) return EncodeLevels<kBits>(y, count, factor, codes);
      if constexpr (kBits > 4) return EncodeIntegers<kBits>(y, count, factor, codes);
    };
    const int32_t squares = n == kCommonBlock ? encode(kCommonBlock) : encode(padded);
    facts.squares[i][slot] = squares - static_cast<int32_t>(padded - n) * kZeroSquare<kFormat>;
  }
}

// ||x|| / ||levels||, with which the decoded block has the length of the block, stretched, times a
// power of two. As 16 bits, nearest, ties to even.
HWY_INLINE void FindScales(const KvHead& head, float power, KvFacts& facts) {
  const DHadamard d;
  const hn::RebindToUnsigned<DHadamard> du;
  const hn::Rebind<uint16_t, DHadamard> d16;
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    for (uint32_t slot = 0; slot < abi::kKvTile; slot += 4) {
      const auto energy =
          hn::Mul(hn::Load(d, facts.sum[i] + slot), hn::Set(d, head.inverse_transform[i]));
      const auto squares = hn::ConvertTo(d, hn::Load(DSquares(), facts.squares[i] + slot));
      const auto scale = hn::Mul(hn::Sqrt(hn::Div(energy, squares)), hn::Set(d, head.stretch));
      const auto scaled = hn::Mul(hn::Mul(scale, hn::Set(d, 0x1p31f)), hn::Set(d, power));
      const auto bits = hn::Min(hn::BitCast(du, scaled), hn::Set(du, 0x7F800000u));
      const auto odd = hn::And(hn::ShiftRight<15>(bits), hn::Set(du, 1u));
      const auto rounded = hn::ShiftRight<15>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x3FFFu))));
      hn::Store(hn::TruncateTo(d16, rounded), d16, facts.scales[i] + slot);
    }
  }
}

// Rows with a block whose squares are too large or too small, or that is not finite. Each transform
// block for itself: a power of two brings it into range. x: the coordinates with signs applied.
template <uint32_t kFormat>
HWY_NOINLINE void EncodeExtreme(const KvHead& head, const float* x, uint32_t slot, KvRow& row,
                                KvFacts& facts) {
  uint32_t scale = 0;
  for (uint32_t b = 0; b < head.blocks.count; ++b) {
    const uint32_t begin = head.blocks.begin[b], n = head.blocks.size[b];
    const KvHead block(n, head.stretch);
    float largest = 0;
    bool finite = true;
    for (uint32_t i = begin; i < begin + n; ++i) {
      finite = finite && std::isfinite(x[i]);
      largest = std::max(largest, std::fabs(x[i]));
    }
    KvRow block_row;
    KvFacts block_facts;
    block_facts.Clear(block.scales.count);
    if (!finite || largest == 0) {
      std::fill_n(block_row.codes, std::max(n, 16u), kZeroCode<abi::kv_bits(kFormat)>);
      for (auto& scales : block_facts.scales) scales[0] = finite ? uint16_t{0} : abi::kKvScaleNaN;
    } else {
      const bool in_range = largest >= 0x1p-30f && largest <= 0x1p30f;
      const int exponent = in_range ? 0 : std::ilogb(largest);
      for (uint32_t i = 0; i < n; ++i) block_row.y[i] = std::ldexp(x[begin + i], -exponent);
      const auto first = [&](size_t i, VHadamard& v0, VHadamard& v1)
                             HWY_ATTR { LoadPair(block_row.y + i, 4, v0, v1); };
      TransformRow<kFormat>(block, first, 0, block_row.y, block_facts);
      FindFactors<kFormat>(block, block_facts);
      CodeRow<kFormat>(block, 0, block_row, block_facts);
      FindScales(block, std::ldexp(1.0f, exponent), block_facts);
    }
    std::copy_n(block_row.codes, std::max(n, 16u), row.codes + begin);
    for (uint32_t i = 0; i < block.scales.count; ++i) {
      facts.scales[scale++][slot] = block_facts.scales[i][0];
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
