// Queries as the operands of decode's kernels: integers of 16 bits for levels, a hi/lo split into
// two bf16 for bf16.

#if defined(GYRE_CPU_ATTENTION_QUERIES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_QUERIES_INL_H
#undef GYRE_CPU_ATTENTION_QUERIES_INL_H
#else
#define GYRE_CPU_ATTENTION_QUERIES_INL_H
#endif

#include <cmath>
#include <cstring>

#include "cpu/attention/problem-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kDecodeRows = 16;  // the most rows that decode takes, prefill takes more

// Scale blocks padded to multiples of `multiple`; padding holds zeros on the query's side.
inline ScaleBlocks PaddedBlocks(uint32_t head_dim, uint32_t multiple) {
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(head_dim);
  ScaleBlocks blocks;
  blocks.count = scales.count;
  uint32_t begin = 0;
  for (uint32_t b = 0; b < scales.count; ++b) {
    blocks.begin[b] = begin;
    blocks.used[b] = scales.size[b];
    blocks.size[b] = (scales.size[b] + multiple - 1) / multiple * multiple;
    begin += blocks.size[b];
  }
  return blocks;
}

// A work tile's queries; the operand itself is in its scratch memory.
struct QueryOperand {
  ScaleBlocks blocks;
  uint32_t row_levels = 0;  // levels of a row of K, padding included
  float scale[kMaxRows];    // what scores of a row are multiplied by
  int32_t sums[kMaxRows * abi::kKvMaxScales];
};

// Splits queries into two bf16: of each four coordinates hi, then lo, lifted.
inline void SplitQueries(const WorkTile& work) {
  static_assert(sizeof(AttentionScratch::operand) >= size_t{4} * kDecodeRows * abi::kKvMaxHeadDim);
  static_assert(sizeof(AttentionScratch::operand) >= size_t{4} * kMaxRows * kMaxLatentDim);
  const hn::CappedTag<float, 4> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const auto half = hn::Set(du, 0x8000);
  const auto cut = [&](auto bits)
                       HWY_ATTR { return hn::BitCast(d, hn::And(bits, hn::Set(du, ~0xFFFFu))); };
  const auto store = [&](auto x, uint16_t* to) HWY_ATTR {
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(hn::BitCast(du, x))), d16, to);
  };
  auto* const to = reinterpret_cast<uint16_t*>(work.scratch->operand);
  for (size_t i = 0; i < size_t{work.rows} * work.k_dim(); i += 4) {
    const auto q = hn::Load(d, work.scratch->q + i);
    const auto bits = hn::BitCast(du, q);
    // The largest numbers would be rounded to infinity, a NaN to anything.
    const auto nearest = cut(hn::Add(bits, half));
    const auto hi = hn::IfThenElse(hn::IsFinite(nearest), nearest, cut(bits));
    const auto nan = hn::IfThenElseZero(hn::IsNaN(q), hn::NaN(d));
    const auto remainder = hn::IfThenElseZero(hn::IsFinite(q), hn::Sub(q, hi));
    const auto lo = hn::BitCast(du, hn::Mul(remainder, hn::Set(d, kBf16Lift)));
    store(hn::Or(hi, nan), to + 2 * i);
    store(hn::BitCast(d, hn::Add(lo, half)), to + 2 * i + 4);
  }
}

// The largest magnitude of a query's coordinates; NaN if one is not finite.
HWY_INLINE float LargestMagnitude(const float* q, uint32_t count) {
  const DF d;
  auto largest_lanes = hn::Zero(d), not_finite = hn::Zero(d);
  for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d))) {
    const auto x = hn::LoadU(d, q + i);
    largest_lanes = hn::Max(largest_lanes, hn::Abs(x));
    not_finite = hn::Add(not_finite, hn::Sub(x, x));  // NaN unless finite
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest_lanes)) + hn::GetLane(hn::SumOfLanes(d, not_finite));
}

// Stores four coordinates of a row's operand, from coordinate `at` on.
template <class V>
HWY_INLINE void StoreQuery(V q, QueryLayout layout, uint32_t row_levels, int8_t* row, uint32_t at) {
  const hn::DFromV<V> di;
  const hn::Rebind<int8_t, decltype(di)> d8;
  const hn::Rebind<int16_t, decltype(di)> d16;
  if (layout == QueryLayout::int16) {
    hn::StoreU(hn::DemoteTo(d16, q), d16, reinterpret_cast<int16_t*>(row) + at);
    return;
  }
  const auto hi = hn::ShiftRight<8>(hn::Add(q, hn::Set(di, 128)));
  const auto lo = hn::Sub(q, hn::ShiftLeft<8>(hi));
  const bool apart = layout == QueryLayout::hi_then_lo;
  int8_t* const place = apart ? row + at : row + size_t{at / 8} * 16 + at % 8;
  hn::StoreU(hn::DemoteTo(d8, hi), d8, place);
  hn::StoreU(hn::DemoteTo(d8, lo), d8, place + (apart ? row_levels : 8));
}

// Rounds queries to integers of 16 bits, and adds them up for kernels whose levels have a bias.
inline void RoundQueries(const WorkTile& work, QueryLayout layout, QueryOperand& operand) {
  constexpr float kTinyQuery = 0x1p-110f;  // below, the inverse of a step would overflow
  constexpr float kMax = 127.0f * 256.0f;  // so that hi fits into a byte
  const hn::CappedTag<float, 4> d;
  const hn::RebindToSigned<decltype(d)> di;
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(work.k_dim());
  const uint32_t row_levels = operand.row_levels;
  std::memset(work.scratch->operand, 0, size_t{2} * work.rows * row_levels);
  for (uint32_t r = 0; r < work.rows; ++r) {
    const float* const q = work.scratch->q + size_t{r} * work.k_dim();
    // A query that is not finite becomes zeros with a scale that is NaN.
    const float magnitude = LargestMagnitude(q, work.k_dim());
    const bool finite = !std::isnan(magnitude);
    const float largest = std::max(finite ? magnitude : 0.0f, kTinyQuery);
    operand.scale[r] = finite ? largest / kMax : magnitude;
    const auto inverse = hn::Set(d, finite ? kMax / largest : 0.0f);
    int8_t* const row = work.scratch->operand + size_t{2} * r * row_levels;
    for (uint32_t b = 0; b < scales.count; ++b) {
      auto sum = hn::Zero(di);
      for (uint32_t i = 0; i < scales.size[b]; i += 4) {
        const auto whole = hn::NearestInt(hn::Mul(hn::Load(d, q + scales.begin[b] + i), inverse));
        sum = hn::Add(sum, whole);
        StoreQuery(whole, layout, row_levels, row, operand.blocks.begin[b] + i);
      }
      operand.sums[r * abi::kKvMaxScales + b] = hn::GetLane(hn::SumOfLanes(di, sum));
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
