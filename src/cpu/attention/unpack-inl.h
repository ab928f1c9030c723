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

// Levels of K, every scale block padded to its size in `padded` with anything, as queries are with
// zeros: rows of `row_bytes`, as many bytes apart as is returned.
HWY_INLINE uint32_t UnpackBlockLevels(const HeadView& cache, const KeyBlock& block,
                                      const ScaleBlocks& padded, uint32_t row_bytes,
                                      int8_t* levels) {
  const uint32_t unpadded = UnpackedStride(cache.layout->head_dim);
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(cache.layout->head_dim);
  const uint32_t last = scales.count - 1, stride = std::max(row_bytes, unpadded);
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
  return stride;
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
