// Rows of ggml's types become f32, padded with zeros to whole vectors of 16 values.

#if defined(GYRE_GGML_UNPACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_UNPACK_INL_H
#undef GYRE_GGML_UNPACK_INL_H
#else
#define GYRE_GGML_UNPACK_INL_H
#endif

#include <algorithm>
#include <cstring>

#include "cpu/kernels/convert-inl.h"
#include "hwy/cache_control.h"
#include "plan.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using cpu::HWY_NAMESPACE::LoadF32;

using DW = hn::CappedTag<float, 16>;
using VW = hn::Vec<DW>;

// One f16 of a block: the bytes after it are the block's, too, so that four may be converted.
HWY_INLINE float HalfAt(const uint8_t* at) {
  const hn::CappedTag<float, 4> d;
  return hn::GetLane(LoadF32(d, reinterpret_cast<const Half*>(at)));
}

// 16-bit and 32-bit floats.
template <class T>
HWY_INLINE void UnpackFloats(const uint8_t* row, uint32_t values, float* HWY_RESTRICT out) {
  const DW d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  const T* const from = reinterpret_cast<const T*>(row);
  uint32_t i = 0;
  for (; i + lanes <= values; i += lanes) hn::StoreU(LoadF32(d, from + i), d, out + i);
  if (i == padded(values)) return;
  T rest[16] = {};
  std::copy(from + i, from + values, rest);
  for (uint32_t j = 0; i < padded(values); i += lanes, j += lanes)
    hn::StoreU(LoadF32(d, rest + j), d, out + i);
}

// value = scale * code + offset.
struct BlockFactors {
  float scale, offset;
};

// 32 bytes of one code each.
HWY_INLINE void StoreBytes(const int8_t* codes, float scale, float* HWY_RESTRICT out) {
  const DW d;
  const hn::Rebind<int8_t, DW> bytes;
  const hn::Rebind<int32_t, DW> words;
  for (size_t i = 0; i < 32; i += hn::Lanes(d)) {
    const auto code = hn::ConvertTo(d, hn::PromoteTo(words, hn::LoadU(bytes, codes + i)));
    hn::StoreU(hn::Mul(code, hn::Set(d, scale)), d, out + i);
  }
}

// 16 bytes of two codes each: the low halves are values 0 to 15, the high ones 16 to 31.
HWY_INLINE void StoreNibbles(const uint8_t* codes, BlockFactors by, float* HWY_RESTRICT out) {
  const DW d;
  const auto scale = hn::Set(d, by.scale), offset = hn::Set(d, by.offset);
  const hn::Rebind<uint8_t, DW> bytes;
  const hn::Rebind<int32_t, DW> words;
  for (size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto both = hn::PromoteTo(words, hn::LoadU(bytes, codes + i));
    const auto low = hn::ConvertTo(d, hn::And(both, hn::Set(words, 15)));
    const auto high = hn::ConvertTo(d, hn::ShiftRight<4>(both));
    hn::StoreU(hn::MulAdd(low, scale, offset), d, out + i);
    hn::StoreU(hn::MulAdd(high, scale, offset), d, out + 16 + i);
  }
}

// As above, with a fifth bit of each code in `high_bits`, the first value's lowest.
HWY_INLINE void StoreFiveBits(const uint8_t* high_bits, const uint8_t* codes, BlockFactors by,
                              float* HWY_RESTRICT out) {
  const DW d;
  const auto scale = hn::Set(d, by.scale), offset = hn::Set(d, by.offset);
  const hn::Rebind<uint8_t, DW> bytes;
  const hn::Rebind<int32_t, DW> words;
  int32_t high = 0;
  std::memcpy(&high, high_bits, 4);
  const auto all = hn::Set(words, high), one = hn::Set(words, 1);
  const auto store = [&](auto code, size_t first) {
    const auto bit = hn::Shr(all, hn::Iota(words, static_cast<int32_t>(first)));
    const auto whole = hn::Or(code, hn::ShiftLeft<4>(hn::And(bit, one)));
    hn::StoreU(hn::MulAdd(hn::ConvertTo(d, whole), scale, offset), d, out + first);
  };
  for (size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto both = hn::PromoteTo(words, hn::LoadU(bytes, codes + i));
    store(hn::And(both, hn::Set(words, 15)), i);
    store(hn::ShiftRight<4>(both), 16 + i);
  }
}

// One block of 32 values.
template <RowType kType>
HWY_INLINE void UnpackBlock(const uint8_t* block, float* HWY_RESTRICT out) {
  const float scale = HalfAt(block);
  if constexpr (kType == RowType::q8_0)
    StoreBytes(reinterpret_cast<const int8_t*>(block + 2), scale, out);
  if constexpr (kType == RowType::q4_0) StoreNibbles(block + 2, {scale, -8 * scale}, out);
  if constexpr (kType == RowType::q4_1) StoreNibbles(block + 4, {scale, HalfAt(block + 2)}, out);
  if constexpr (kType == RowType::q5_0)
    StoreFiveBits(block + 2, block + 6, {scale, -16 * scale}, out);
  if constexpr (kType == RowType::q5_1)
    StoreFiveBits(block + 4, block + 8, {scale, HalfAt(block + 2)}, out);
}

template <RowType kType>
HWY_INLINE void UnpackRow(const uint8_t* row, uint32_t values, float* HWY_RESTRICT out) {
  if constexpr (kType == RowType::f32) return UnpackFloats<float>(row, values, out);
  if constexpr (kType == RowType::f16) return UnpackFloats<Half>(row, values, out);
  if constexpr (kType == RowType::bf16) return UnpackFloats<BFloat16>(row, values, out);
  if constexpr (row_format(kType).block == 32) {
    for (uint32_t i = 0; i < values; i += 32)
      UnpackBlock<kType>(row + row_bytes(kType, i), out + i);
  }
}

// Rows of a block of cells, and where the rows lie that are unpacked after them.
struct RowRun {
  const uint8_t* rows = nullptr;
  uint64_t stride = 0;
  uint32_t count = 0, values = 0;
  const uint8_t* next = nullptr;  // null: nothing follows
};

template <RowType kType>
void UnpackRowsOf(const RowRun& run, float* HWY_RESTRICT out) {
  const uint64_t bytes = row_bytes(kType, run.values), width = block_stride(run.values);
  for (uint32_t i = 0; i < run.count; ++i) {
    if (run.next != nullptr) {
      const uint8_t* const next = run.next + i * run.stride;
      for (uint64_t at = 0; at < bytes; at += 64) hwy::Prefetch(next + at);
      hwy::Prefetch(next + bytes - 1);
    }
    UnpackRow<kType>(run.rows + i * run.stride, run.values, out + i * width);
  }
}

// [cell][block_stride(values)]
HWY_INLINE void UnpackRows(RowType type, const RowRun& run, float* HWY_RESTRICT out) {
  switch (type) {
    case RowType::f32:
      return UnpackRowsOf<RowType::f32>(run, out);
    case RowType::f16:
      return UnpackRowsOf<RowType::f16>(run, out);
    case RowType::bf16:
      return UnpackRowsOf<RowType::bf16>(run, out);
    case RowType::q4_0:
      return UnpackRowsOf<RowType::q4_0>(run, out);
    case RowType::q4_1:
      return UnpackRowsOf<RowType::q4_1>(run, out);
    case RowType::q5_0:
      return UnpackRowsOf<RowType::q5_0>(run, out);
    case RowType::q5_1:
      return UnpackRowsOf<RowType::q5_1>(run, out);
    case RowType::q8_0:
      return UnpackRowsOf<RowType::q8_0>(run, out);
  }
}

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
