// From a head's coordinates to codes and scales (native formats). The steps and their order are
// docs/kv_formats.md's.

#if defined(GYRE_CPU_KV_FEEDBACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_FEEDBACK_INL_H
#undef GYRE_CPU_KV_FEEDBACK_INL_H
#else
#define GYRE_CPU_KV_FEEDBACK_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "abi/kv_codec.h"
#include "cpu/kernels/convert-inl.h"
#include "cpu/kernels/hadamard-inl.h"
#include "cpu/kernels/kv_codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// A row being encoded: transformed coordinates, then codes, one byte each. Both are transposed in
// groups of 16.
struct KvRow {
  alignas(64) float y[abi::kKvMaxHeadDim + 8];
  alignas(64) uint8_t codes[abi::kKvMaxHeadDim + 64];
};

// Sums and scales of a tile's scale blocks, slot by slot: the steps from sums to scales take four
// slots at a time.
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

// Scale blocks of a head. A tile is encoded step by step, each step for all of its rows: divisions
// and square roots are then taken for four rows at once.
struct KvHead {
  abi::KvBlocks blocks;
  abi::KvScaleBlocks scales;

  float stretch;                          // 1, or what V's scales are multiplied by
  float inverse_size[abi::kKvMaxScales];  // powers of two: exact
  float inverse_transform[abi::kKvMaxScales];
  bool ends_block[abi::kKvMaxScales];  // the last of its transform block

  HWY_NOINLINE KvHead(uint32_t head_dim, float scale_stretch)
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
// applied, after the stage 4. A last block of 8 has memory for 16. kLargest: see FindFactors.
template <bool kLargest, class First>
HWY_INLINE void TransformRow(const KvHead& head, const First& first, uint32_t slot, float* y,
                             KvFacts& facts) {
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

template <uint32_t kFormat>
HWY_INLINE void FindFactors(const KvHead& head, KvFacts& facts) {
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
      if constexpr (!abi::kv_has_magnitudes(kFormat)) {
        // The root of a rounded square is exactly what was squared, if the square is normal.
        LoadSlots(facts.largest[i] + slot, v);
        square = hn::Max(hn::Max(v[0], v[2]), hn::Max(v[1], v[3]));
      }
      hn::Store(hn::Div(hn::Set(d, abi::kv_codec(kFormat).gain), hn::Sqrt(square)), d,
                facts.factor[i] + slot);
    }
  }
}

// The factor of a block so small that its squares lose bits: part of a large transform block.
template <uint32_t kFormat>
inline float FactorOfSmall(const float* y, uint32_t n, float factor) {
  if constexpr (abi::kv_has_magnitudes(kFormat)) return factor;
  float largest = 0;
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(y[i]));
  return abi::kv_codec(kFormat).gain / largest;
}

template <uint32_t kFormat>
HWY_NOINLINE void CodeRow(const KvHead& head, uint32_t slot, KvRow& row, KvFacts& facts) {
  for (uint32_t i = 0; i < head.scales.count; ++i) {
    const uint32_t n = head.scales.size[i], padded = std::max(n, 16u);
    const float* const y = row.y + head.scales.begin[i];
    uint8_t* const codes = row.codes + head.scales.begin[i];
    const float sum = facts.sum[i][slot];
    float factor = facts.factor[i][slot];
    if (HWY_UNLIKELY(sum < 0x1p-90f)) {
      if (sum == 0) {
        std::fill_n(codes, padded, kZeroCode<kFormat>);
        facts.squares[i][slot] = 1;
        continue;
      }
      factor = FactorOfSmall<kFormat>(y, padded, factor);
    }
    const auto encode = [&](size_t count)
                            HWY_ATTR { return EncodeFormat<kFormat>(y, count, factor, codes); };
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

template <bool kLargest>
HWY_NOINLINE void TransformInPlace(const KvHead& head, uint32_t slot, float* y, KvFacts& facts) {
  const auto first = [&](size_t i, VHadamard& v0, VHadamard& v1)
                         HWY_ATTR { LoadPair(y + i, 4, v0, v1); };
  TransformRow<kLargest>(head, first, slot, y, facts);
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
      std::fill_n(block_row.codes, std::max(n, 16u), kZeroCode<kFormat>);
      for (auto& scales : block_facts.scales)
        scales[slot] = finite ? uint16_t{0} : abi::kKvScaleNaN;
    } else {
      const bool in_range = largest >= 0x1p-30f && largest <= 0x1p30f;
      const int exponent = in_range ? 0 : std::ilogb(largest);
      for (uint32_t i = 0; i < n; ++i) block_row.y[i] = std::ldexp(x[begin + i], -exponent);
      TransformInPlace<!abi::kv_has_magnitudes(kFormat)>(block, slot, block_row.y, block_facts);
      FindFactors<kFormat>(block, block_facts);
      CodeRow<kFormat>(block, slot, block_row, block_facts);
      FindScales(block, std::ldexp(1.0f, exponent), block_facts);
    }
    std::copy_n(block_row.codes, std::max(n, 16u), row.codes + begin);
    for (uint32_t i = 0; i < block.scales.count; ++i) {
      facts.scales[scale++][slot] = block_facts.scales[i][slot];
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
