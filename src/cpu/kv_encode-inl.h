// From a head's coordinates to codes and scales (native formats). The steps and their order are
// docs/kv_formats.md's.

#if defined(GYRE_CPU_KV_ENCODE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_ENCODE_INL_H
#undef GYRE_CPU_KV_ENCODE_INL_H
#else
#define GYRE_CPU_KV_ENCODE_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "abi/kv_codec.h"
#include "cpu/convert-inl.h"
#include "cpu/hadamard-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using DCode = hn::CappedTag<uint8_t, 16>;
using VCode = hn::Vec<DCode>;

// Codes of one row, one byte each, and its scales.
struct KvRow {
  alignas(64) uint8_t codes[abi::kKvMaxHeadDim + 64];
  uint16_t scales[abi::kKvMaxScales];
};

// What coding needs to know of a scale block.
struct BlockFacts {
  float sum;      // of squares
  float largest;  // magnitude
};

// The last stages of a scale block: kRadix / 2 outer ones that were left, then 1 and 2. Coordinates
// stay transposed in groups of 16. The sum of squares, product and sum rounded apart: lane l of a
// group is (y[4l]^2 + y[4l+2]^2) + (y[4l+1]^2 + y[4l+3]^2); the groups of each quarter of the block
// (at least a group) are added in order, then the quarters, (0 + 2) + (1 + 3), then the lanes
// likewise.
template <bool kLargest, uint32_t kRadix>
HWY_INLINE BlockFacts FinishBlock(float* HWY_RESTRICT y, size_t n) {
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
    if constexpr (kLargest) {
      largest = hn::Max(
          largest, hn::Max(hn::Max(hn::Abs(v0), hn::Abs(v1)), hn::Max(hn::Abs(v2), hn::Abs(v3))));
    }
    const auto even = hn::Add(hn::Mul(v0, v0), hn::Mul(v2, v2)),
               odd = hn::Add(hn::Mul(v1, v1), hn::Mul(v3, v3));
    sum = hn::Add(sum, hn::Add(even, odd));
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
  alignas(16) float lane[4];
  hn::Store(hn::Add(hn::Add(quarters[0], quarters[2]), hn::Add(quarters[1], quarters[3])), d, lane);
  return {(lane[0] + lane[2]) + (lane[1] + lane[3]),
          kLargest ? hn::GetLane(hn::MaxOfLanes(d, largest)) : 0.0f};
}

// value * 2^exponent as a 16-bit scale, nearest, ties to even.
inline uint16_t EncodeScale(float value, int exponent) {
  const float scaled = exponent == 0 ? value * 0x1p31f : std::ldexp(value, exponent + 31);
  const auto bits = std::bit_cast<uint32_t>(scaled);
  if (bits >= 0x7F800000u) return abi::kKvScaleInfinity;
  return static_cast<uint16_t>((bits + 0x3FFFu + (bits >> 15 & 1u)) >> 15);
}

HWY_INLINE hn::Vec<hn::RebindToSigned<DHadamard>> CeilToInt(VHadamard v) {
#if HWY_ARCH_ARM_A64
  return hn::Vec<hn::RebindToSigned<DHadamard>>(vcvtpq_s32_f32(v.raw));  // one instruction for two
#else
  return hn::ConvertTo(hn::RebindToSigned<DHadamard>(), hn::Ceil(v));
#endif
}

using VInt = hn::Vec<hn::RebindToSigned<DHadamard>>;

// Four vectors of integers within 16 bits to 16 saturated bytes.
template <class T>
HWY_INLINE hn::Vec<hn::CappedTag<T, 16>> NarrowToBytes(VInt v0, VInt v1, VInt v2, VInt v3) {
  const hn::CappedTag<int16_t, 8> d16;
  const hn::CappedTag<T, 16> d8;
  const hn::Half<decltype(d8)> h8;
  const auto low = hn::ConcatEven(d16, hn::BitCast(d16, v1), hn::BitCast(d16, v0));
  const auto high = hn::ConcatEven(d16, hn::BitCast(d16, v3), hn::BitCast(d16, v2));
  return hn::Combine(d8, hn::DemoteTo(h8, high), hn::DemoteTo(h8, low));
}

// The upper bytes of four vectors of floats; sign in the top bit.
HWY_INLINE VCode TopBytes(VHadamard v0, VHadamard v1, VHadamard v2, VHadamard v3) {
  const hn::CappedTag<uint16_t, 8> d16;
  const auto low = hn::ConcatOdd(d16, hn::BitCast(d16, v1), hn::BitCast(d16, v0));
  const auto high = hn::ConcatOdd(d16, hn::BitCast(d16, v3), hn::BitCast(d16, v2));
  const hn::Half<DCode> h8;
  return hn::Combine(DCode(), hn::TruncateTo(h8, hn::ShiftRight<8>(high)),
                     hn::TruncateTo(h8, hn::ShiftRight<8>(low)));
}

// Lane l of vector k is coordinate 4 l + k; this puts bytes back in natural order.
HWY_INLINE VCode NaturalOrder(VCode bytes) {
  alignas(16) static constexpr uint8_t kNatural[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
  return hn::TableLookupBytes(bytes, hn::Load(DCode(), kNatural));
}

// Sum of the squares of 16 magnitudes, each at most 127, into four lanes of u32.
template <class D32 = hn::CappedTag<uint32_t, 4>, class V32 = hn::Vec<D32>>
HWY_INLINE V32 AddSquares(V32 total, VCode level) {
  const hn::CappedTag<uint16_t, 8> d16;
  const D32 d32;
  const hn::Half<DCode> half;
  const auto low = hn::PromoteTo(d16, hn::LowerHalf(half, level));
  const auto high = hn::PromoteTo(d16, hn::UpperHalf(half, level));
  const auto squares = hn::Add(hn::Mul(low, low), hn::Mul(high, high));  // at most 2 * 127^2: fits
  const hn::Half<decltype(d16)> half16;
  total = hn::Add(total, hn::PromoteTo(d32, hn::LowerHalf(half16, squares)));
  return hn::Add(total, hn::PromoteTo(d32, hn::UpperHalf(half16, squares)));
}

// Magnitude tables of 2 to 4-bit formats in the form the coder uses: ceil(2 |v|) / 16 picks a
// bucket, and no bucket holds more than one threshold.
struct LevelTables {
  alignas(16) uint8_t first[16];      // index of the magnitude at the bucket's lower end
  alignas(16) uint8_t threshold[16];  // the bucket's threshold, 255 if it has none
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
      if (threshold < 16 * bucket) ++tables.first[bucket];
      if (threshold >= 16 * bucket && threshold < 16 * bucket + 16)
        tables.threshold[bucket] = threshold;
    }
  }
  return tables;
}

inline constexpr LevelTables kTq2Tables = MakeLevelTables(abi::kTq2Levels, abi::kTq2Thresholds);
inline constexpr LevelTables kTq3Tables = MakeLevelTables(abi::kTq3Levels, abi::kTq3Thresholds);
inline constexpr LevelTables kTq4Tables = MakeLevelTables(abi::kTq4Levels, abi::kTq4Thresholds);

// 2 to 4 bits: sign and index of the nearest magnitude, a tie to the smaller one. Returns the sum
// of squared levels.
template <uint32_t kBits>
HWY_INLINE uint32_t EncodeLevels(const float* HWY_RESTRICT y, uint32_t n, float inverse,
                                 const LevelTables& tables, uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  const DCode db;
  const auto factor = hn::Set(d, inverse);
  const auto first = hn::Load(db, tables.first), threshold = hn::Load(db, tables.threshold);
  const auto level = hn::Load(db, tables.level);
  auto squares = hn::Zero(hn::CappedTag<uint32_t, 4>());
  const auto doubled = [&](VHadamard v) HWY_ATTR { return CeilToInt(hn::Mul(hn::Abs(v), factor)); };
  for (const float* const end = y + n; y != end; y += 16, codes += 16) {
    const auto v0 = hn::Load(d, y), v1 = hn::Load(d, y + 4), v2 = hn::Load(d, y + 8),
               v3 = hn::Load(d, y + 12);
    const auto a = NarrowToBytes<uint8_t>(doubled(v0), doubled(v1), doubled(v2), doubled(v3));
    const auto bucket = hn::ShiftRight<4>(a);
    const auto above = hn::VecFromMask(db, hn::Gt(a, hn::TableLookupBytes(threshold, bucket)));
    const auto index = hn::Sub(hn::TableLookupBytes(first, bucket), above);
    squares = AddSquares(squares, hn::TableLookupBytes(level, index));
    const auto sign = hn::And(hn::ShiftRight<8 - kBits>(TopBytes(v0, v1, v2, v3)),
                              hn::Set(db, uint8_t{1 << (kBits - 1)}));
    hn::StoreU(NaturalOrder(hn::Or(index, sign)), db, codes);
  }
  return hn::GetLane(hn::SumOfLanes(hn::CappedTag<uint32_t, 4>(), squares));
}

// 5, 6 and 8 bits: the nearest integer (odd ones below 8 bits), a tie to the lower one.
template <uint32_t kBits>
HWY_INLINE uint32_t EncodeIntegers(const float* HWY_RESTRICT y, uint32_t n, float inverse,
                                   uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  const DCode db;
  const hn::CappedTag<int8_t, 16> ds;
  constexpr int8_t kTop = kBits == 8 ? 127 : 1 << (kBits - 1);
  const auto factor = hn::Set(d, inverse);
  auto squares = hn::Zero(hn::CappedTag<uint32_t, 4>());
  const auto whole = [&](const float* at) HWY_ATTR {
    const auto v = hn::Mul(hn::Load(d, at), factor);
    return CeilToInt(kBits == 8 ? hn::Sub(v, hn::Set(d, 0.5f)) : v);
  };
  for (const float* const end = y + n; y != end; y += 16, codes += 16) {
    auto q = NarrowToBytes<int8_t>(whole(y), whole(y + 4), whole(y + 8), whole(y + 12));
    q = hn::Min(hn::Max(q, hn::Set(ds, kBits == 8 ? -kTop : 1 - kTop)), hn::Set(ds, kTop));
    const auto odd = kBits == 8 ? q : hn::Sub(hn::Add(q, q), hn::Set(ds, int8_t{1}));
    squares = AddSquares(squares, hn::BitCast(db, hn::Abs(odd)));
    const auto code = kBits == 8 ? q : hn::Add(q, hn::Set(ds, kTop - 1));
    hn::StoreU(NaturalOrder(hn::BitCast(db, code)), db, codes);
  }
  return hn::GetLane(hn::SumOfLanes(hn::CappedTag<uint32_t, 4>(), squares));
}

// Code of a coordinate that is zero, and its squared level.
template <uint32_t kBits>
inline constexpr uint8_t kZeroCode = kBits == 5 || kBits == 6 ? 1 << (kBits - 1) : 0;
template <uint32_t kFormat>
inline constexpr auto kZeroSquare =
    static_cast<uint32_t>(abi::kv_level(kFormat, kZeroCode<abi::kv_bits(kFormat)>) *
                          abi::kv_level(kFormat, kZeroCode<abi::kv_bits(kFormat)>));

// The work on a row falls into steps, each done for all rows of a tile before the next: divisions
// and square roots of different rows then overlap instead of standing in one chain.
struct KvHead {
  abi::KvBlocks blocks;
  abi::KvScaleBlocks scales;

  float inverse_size[abi::kKvMaxScales];  // powers of two: exact
  float inverse_transform[abi::kKvMaxScales];

  explicit KvHead(uint32_t head_dim)
      : blocks(abi::kv_blocks(head_dim)), scales(abi::kv_scale_blocks(head_dim)) {
    for (uint32_t i = 0; i < scales.count; ++i) {
      inverse_size[i] = 1.0f / static_cast<float>(scales.size[i]);
      inverse_transform[i] = 1.0f / static_cast<float>(scales.transform[i]);
    }
  }
};

struct KvWork {
  alignas(64) float y[abi::kKvMaxHeadDim + 8];
  BlockFacts facts[abi::kKvMaxScales];
  float factor[abi::kKvMaxScales];
  uint32_t squares[abi::kKvMaxScales];
  bool extreme;  // squares leave the range of f32
};

// Transforms the coordinates that load(i) gives, four at a time from i on, with signs applied. A
// last block of 8 has room for 16.
template <uint32_t kFormat, class Load>
HWY_INLINE void TransformRow(const KvHead& head, const Load& load, KvWork& work) {
  constexpr bool kLargest = abi::kv_bits(kFormat) > 4;
  work.extreme = false;
  uint32_t scale = 0;
  for (uint32_t b = 0; b < head.blocks.count; ++b) {
    const size_t begin = head.blocks.begin[b], n = head.blocks.size[b];
    float* const y = work.y + begin;
    const bool fused = n == 128;  // the most common size gets its last four stages in one pass
    HadamardOuter([&](size_t i) HWY_ATTR { return load(begin + i); }, y, n, fused ? n / 4 : n);
    if (n < 16) std::fill_n(y + n, 16 - n, 0.0f);  // zeros stay zeros in the last two stages
    const size_t size = std::min<size_t>(n, abi::kKvScaleBlock);
    float sum = 0;
    for (size_t part = 0; part < n; part += size, ++scale) {
      work.facts[scale] = fused ? FinishBlock<kLargest, 4>(y, n)
                                : FinishBlock<kLargest, 1>(y + part, std::max<size_t>(size, 16));
      sum += work.facts[scale].sum;
    }
    work.extreme = work.extreme || !(sum >= 0x1p-80f && sum <= 0x1p120f);
  }
}

template <uint32_t kFormat>
HWY_INLINE void FindFactors(const KvHead& head, KvWork& work) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    if constexpr (kBits <= 4) {
      constexpr float kGain =
          kBits == 2 ? abi::kTq2Gain : (kBits == 3 ? abi::kTq3Gain : abi::kTq4Gain);
      work.factor[i] = kGain / std::sqrt(work.facts[i].sum * head.inverse_size[i]);
    } else {
      constexpr float kTop = kBits == 8 ? 127.0f : static_cast<float>(1 << (kBits - 1));
      work.factor[i] = kTop / work.facts[i].largest;
    }
  }
}

template <uint32_t kFormat>
HWY_INLINE void CodeRow(const KvHead& head, KvWork& work, uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    const uint32_t begin = head.scales.begin[i], n = head.scales.size[i], padded = std::max(n, 16u);
    if (work.facts[i].sum == 0) {
      std::fill_n(codes + begin, n, kZeroCode<kBits>);
      work.squares[i] = 1;
      continue;
    }
    if constexpr (kBits <= 4) {
      const LevelTables& tables = kBits == 2 ? kTq2Tables : (kBits == 3 ? kTq3Tables : kTq4Tables);
      work.squares[i] =
          EncodeLevels<kBits>(work.y + begin, padded, work.factor[i], tables, codes + begin);
    } else {
      work.squares[i] =
          EncodeIntegers<kBits>(work.y + begin, padded, work.factor[i], codes + begin);
    }
    work.squares[i] -= (padded - n) * kZeroSquare<kFormat>;
  }
}

// ||x|| / ||levels||: the decoded block has the length of the block.
HWY_INLINE void FindScales(const KvHead& head, const KvWork& work, int exponent,
                           uint16_t* HWY_RESTRICT scales) {
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    const float energy = work.facts[i].sum * head.inverse_transform[i];
    scales[i] = EncodeScale(std::sqrt(energy / static_cast<float>(work.squares[i])), exponent);
  }
}

// Rows with a block whose squares are too large or too small, or that is not finite. Each transform
// block for itself: a power of two brings it into range. x: the coordinates with signs applied.
template <uint32_t kFormat>
HWY_NOINLINE void EncodeExtreme(const KvHead& head, const float* x, KvWork& work, uint8_t* codes,
                                uint16_t* scales) {
  for (uint32_t b = 0; b < head.blocks.count; ++b) {
    const uint32_t begin = head.blocks.begin[b], n = head.blocks.size[b];
    const KvHead block(n);
    float largest = 0;
    bool finite = true;
    for (uint32_t i = begin; i < begin + n; ++i) {
      finite = finite && std::isfinite(x[i]);
      largest = std::max(largest, std::fabs(x[i]));
    }
    if (!finite || largest == 0) {
      std::fill_n(codes + begin, n, kZeroCode<abi::kv_bits(kFormat)>);
      std::fill_n(scales, block.scales.count, finite ? uint16_t{0} : abi::kKvScaleNaN);
    } else {
      const bool in_range = largest >= 0x1p-30f && largest <= 0x1p30f;
      const int exponent = in_range ? 0 : std::ilogb(largest);
      for (uint32_t i = 0; i < n; ++i) work.y[i] = std::ldexp(x[begin + i], -exponent);
      const float* const scaled = work.y;
      TransformRow<kFormat>(
          block, [&](size_t i) HWY_ATTR { return hn::Load(DHadamard(), scaled + i); }, work);
      FindFactors<kFormat>(block, work);
      CodeRow<kFormat>(block, work, codes + begin);
      FindScales(block, work, exponent, scales);
    }
    scales += block.scales.count;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
