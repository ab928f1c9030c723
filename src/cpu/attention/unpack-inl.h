// A block's keys or values for kernels that do not read codes themselves: as f32 rows, or as one
// byte a level. cpu/kernels/unpack-inl.h does the unpacking.

#if defined(GYRE_CPU_ATTENTION_UNPACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_UNPACK_INL_H
#undef GYRE_CPU_ATTENTION_UNPACK_INL_H
#else
#define GYRE_CPU_ATTENTION_UNPACK_INL_H
#endif

#include <algorithm>
#include <cstring>

#include "cpu/attention/problem-inl.h"
#include "cpu/kernels/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Rows of f32 in the rotated domain, lane by lane; lanes without a key are left alone.
HWY_INLINE void UnpackBlock(const HeadView& cache, const KeyBlock& block, float* rows) {
  const uint64_t n = cache.layout->head_dim;
  for (uint32_t t = 0; t < block.tiles(); ++t) {
    const uint32_t first = t * abi::kKvTile;
    const Share slots{std::max(block.begin, first) - first,
                      std::min(block.end, first + abi::kKvTile) - first};
    UnpackTile(*cache.layout, cache.tile(block.at + t), cache.tile_scales(block.at + t), slots,
               rows + first * n);
  }
}

// A scale block of 8 levels or a multiple of 16.
HWY_INLINE void CopyLevels(const int8_t* HWY_RESTRICT from, uint32_t size,
                           int8_t* HWY_RESTRICT to) {
  const hn::CappedTag<int8_t, 16> d;
  uint32_t i = 0;
  for (; i + 16 <= size; i += 16) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
  if (i < size) std::memcpy(to + i, from + i, 8);
}

// Bytes from row to row of levels that are padded to `row_bytes`.
inline uint32_t LevelsStride(uint32_t head_dim, uint32_t row_bytes) {
  return std::max(row_bytes, UnpackedStride(head_dim));
}

// Levels of K, every scale block padded to its size in `padded` with what is there, as queries are
// with zeros: rows LevelsStride() apart.
HWY_INLINE void UnpackBlockLevels(const HeadView& cache, const KeyBlock& block,
                                  const ScaleBlocks& padded, uint32_t stride, int8_t* levels) {
  const uint32_t unpadded = UnpackedStride(cache.layout->head_dim);
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(cache.layout->head_dim);
  const uint32_t last = scales.count - 1;
  // No block has moved: rows are unpacked to where they stay.
  const bool in_place = padded.begin[last] == scales.begin[last];
  alignas(64) int8_t unpacked[kUnpackedTileBytes];
  for (uint32_t t = 0; t < block.tiles(); ++t) {
    int8_t* const rows = levels + size_t{t} * abi::kKvTile * stride;
    const uint8_t* const tile = cache.tile(block.at + t);
    if (in_place) {
      UnpackTileLevels(*cache.layout, tile, stride, rows);
      continue;
    }
    UnpackTileLevels(*cache.layout, tile, unpadded, unpacked);
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      for (uint32_t b = 0; b < scales.count; ++b)
        CopyLevels(unpacked + size_t{slot} * unpadded + scales.begin[b], scales.size[b],
                   rows + size_t{slot} * stride + padded.begin[b]);
    }
  }
}

// to[coordinate][slot] = from[slot][coordinate], for 16 coordinates of the 8 slots of a tile.
HWY_INLINE void TransposeTile(const int8_t* from, size_t stride, int8_t* to) {
  const hn::CappedTag<int8_t, 16> d;
  const hn::Repartition<int16_t, decltype(d)> d16;
  const hn::Repartition<int32_t, decltype(d)> d32;
  const auto row = [&](size_t slot) HWY_ATTR { return hn::LoadU(d, from + slot * stride); };
  // Pairs of slots, then fours, then eights: each step doubles what lies side by side.
  const auto pairs = [&](size_t slot, auto& low, auto& high) HWY_ATTR {
    const auto a = row(slot), b = row(slot + 1);
    low = hn::BitCast(d16, hn::InterleaveLower(d, a, b));
    high = hn::BitCast(d16, hn::InterleaveUpper(d, a, b));
  };
  hn::Vec<decltype(d16)> low[4], high[4];
  for (size_t i = 0; i < 4; ++i) pairs(2 * i, low[i], high[i]);
  const auto store = [&](const hn::Vec<decltype(d16)>(&of)[4], int8_t* at) HWY_ATTR {
    const auto early0 = hn::BitCast(d32, hn::InterleaveLower(d16, of[0], of[1]));
    const auto early1 = hn::BitCast(d32, hn::InterleaveUpper(d16, of[0], of[1]));
    const auto late0 = hn::BitCast(d32, hn::InterleaveLower(d16, of[2], of[3]));
    const auto late1 = hn::BitCast(d32, hn::InterleaveUpper(d16, of[2], of[3]));
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d32, early0, late0)), d, at);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d32, early0, late0)), d, at + 16);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d32, early1, late1)), d, at + 32);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d32, early1, late1)), d, at + 48);
  };
  store(low, to);
  store(high, to + 64);
}

// Rows of levels as the tiles of 8 tokens that V of tq8 has. Scale blocks are padded in rows, not
// in tiles.
HWY_INLINE void TileBlockLevels(const int8_t* levels, uint32_t stride, const KeyBlock& block,
                                const ScaleBlocks& padded, int8_t* tiles) {
  for (uint32_t t = 0; t < block.tiles(); ++t) {
    const int8_t* const rows = levels + size_t{t} * abi::kKvTile * stride;
    for (uint32_t b = 0; b < padded.count; ++b) {
      for (uint32_t i = 0; i < padded.used[b]; i += 16, tiles += 16 * abi::kKvTile)
        TransposeTile(rows + padded.begin[b] + i, stride, tiles);
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
