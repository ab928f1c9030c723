// The rotary part of latent attention: each block of it is unpacked to f32 once, keys along the
// vectors, and its dot products with the rotary coordinates of queries are added to the scores of
// the latent.

#if defined(GYRE_CPU_ATTENTION_ROTARY_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_ROTARY_INL_H
#undef GYRE_CPU_ATTENTION_ROTARY_INL_H
#else
#define GYRE_CPU_ATTENTION_ROTARY_INL_H
#endif

#include <bit>
#include <cstring>

#include "cpu/attention/problem-inl.h"
#include "cpu/attention/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// to[i * to_stride + j] = from[j * from_stride + i], for i and j below 4.
HWY_INLINE void Transpose4x4(const float* from, size_t from_stride, float* to, size_t to_stride) {
  const hn::CappedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> dd;
  const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + from_stride),
             r2 = hn::LoadU(d, from + 2 * from_stride), r3 = hn::LoadU(d, from + 3 * from_stride);
  const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d, to + to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d, to + 3 * to_stride);
}

class RotaryScores {
 public:
  explicit RotaryScores(const WorkTile& work) : work_(work) {}

  // The block's keys as [coordinate][key].
  void load(const KeyBlock& block) const {
    const uint32_t n = work_.rotary_dim();
    float* const keys = work_.scratch->rotary_keys();
    if (work_.rotary.layout->format == abi::kTq8) return load_bytes(block, keys);
    float* const rows = work_.scratch->rotary_rows();
    UnpackBlock(work_.rotary, block, rows);
    for (uint32_t key = 0; key < block.lanes(); key += 4) {
      for (uint32_t i = 0; i < n; i += 4)
        Transpose4x4(rows + size_t{key} * n + i, n, keys + size_t{i} * kBlockKeys + key,
                     kBlockKeys);
    }
  }

  // scores[row * kBlockKeys + key] = scores * unit[row] + rotary dot product, for rows from `first`
  // on.
  void add(const KeyBlock& block, uint32_t first, uint32_t rows, const float* unit,
           float* scores) const {
    uint32_t row = 0;
    for (; row + 4 <= rows; row += 4)
      add_rows<4>(block, first + row, unit + row, scores + size_t{row} * kBlockKeys);
    for (; row < rows; ++row)
      add_rows<1>(block, first + row, unit + row, scores + size_t{row} * kBlockKeys);
  }

 private:
  // Tiles of V have the bytes of 8 tokens side by side.
  void load_bytes(const KeyBlock& block, float* keys) const {
    const DF d;
    const hn::RebindToSigned<DF> d32;
    const hn::Rebind<int8_t, DF> d8;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    const abi::KvScaleBlocks blocks = abi::kv_scale_blocks(work_.rotary_dim());
    alignas(32) float scales[abi::kKvTile];
    for (uint32_t t = 0; t < block.tiles(); ++t) {
      const auto* const bytes = reinterpret_cast<const int8_t*>(work_.rotary.tile(block.at + t));
      for (uint32_t b = 0; b < blocks.count; ++b) {
        const uint8_t* const stored = work_.rotary.tile_scales(block.at + t) + b * 2 * abi::kKvTile;
        for (uint32_t i = 0; i < abi::kKvTile; ++i) scales[i] = StoredScale(stored + 2 * i);
        for (uint32_t c = blocks.begin[b]; c < blocks.begin[b] + blocks.size[b]; ++c) {
          for (uint32_t i = 0; i < abi::kKvTile; i += lanes) {
            const auto level = hn::PromoteTo(d32, hn::LoadU(d8, bytes + c * abi::kKvTile + i));
            hn::Store(hn::Mul(hn::ConvertTo(d, level), hn::Load(d, scales + i)), d,
                      keys + size_t{c} * kBlockKeys + t * abi::kKvTile + i);
          }
        }
      }
    }
  }

  static float StoredScale(const uint8_t* bytes) {
    uint16_t stored = 0;
    std::memcpy(&stored, bytes, 2);
    return std::bit_cast<float>(uint32_t{stored} << 15) * 0x1p-31f;
  }

  using D = hn::CappedTag<float, 16>;
  static constexpr uint32_t kVectors = 4;

  template <uint32_t kRows>
  void add_rows(const KeyBlock& block, uint32_t first, const float* unit, float* scores) const {
    const D d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    const uint32_t n = work_.rotary_dim();
    const float* const q = work_.scratch->rotary_queries() + size_t{first} * n;
    for (uint32_t key = 0; key < block.lanes(); key += kVectors * lanes) {
      hn::Vec<D> acc[kRows][kVectors];
      for (auto& of_row : acc) {
        for (auto& a : of_row) a = hn::Zero(d);
      }
      const float* keys = work_.scratch->rotary_keys() + key;
      for (uint32_t i = 0; i < n; ++i, keys += kBlockKeys) {
        for (uint32_t r = 0; r < kRows; ++r) {
          const auto query = hn::Set(d, q[size_t{r} * n + i]);
          for (uint32_t j = 0; j < kVectors; ++j)
            acc[r][j] = hn::MulAdd(query, hn::Load(d, keys + j * lanes), acc[r][j]);
        }
      }
      for (uint32_t r = 0; r < kRows; ++r) {
        const auto units = hn::Set(d, unit[r]);
        for (uint32_t j = 0; j < kVectors; ++j) {
          float* const at = scores + size_t{r} * kBlockKeys + key + j * lanes;
          hn::Store(hn::MulAdd(hn::Load(d, at), units, acc[r][j]), d, at);
        }
      }
    }
  }

  const WorkTile& work_;
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
