// A block's keys or values for kernels that do not read codes themselves: as f32 rows, or as one
// byte a level. cpu/kernels/unpack-inl.h does the unpacking.

#if defined(GYRE_CPU_ATTENTION_UNPACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_UNPACK_INL_H
#undef GYRE_CPU_ATTENTION_UNPACK_INL_H
#else
#define GYRE_CPU_ATTENTION_UNPACK_INL_H
#endif

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

// Levels of K, every scale block padded with zeros to its size in `padded`: rows of `row_bytes`, as
// many bytes apart as is returned.
HWY_INLINE uint32_t UnpackBlockLevels(const HeadView& cache, const KeyBlock& block,
                                      const ScaleBlocks& padded, uint32_t row_bytes,
                                      int8_t* levels) {
  const uint32_t unpadded = UnpackedStride(cache.layout->head_dim);
  if (row_bytes == cache.layout->head_dim) {
    for (uint32_t t = 0; t < block.tiles(); ++t)
      UnpackTileLevels(*cache.layout, cache.tile(block.at + t), unpadded,
                       levels + size_t{t} * abi::kKvTile * unpadded);
    return unpadded;
  }
  alignas(64) int8_t tile[kUnpackedTileBytes];
  const abi::KvScaleBlocks scales = abi::kv_scale_blocks(cache.layout->head_dim);
  for (uint32_t t = 0; t < block.tiles(); ++t) {
    UnpackTileLevels(*cache.layout, cache.tile(block.at + t), unpadded, tile);
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      int8_t* const to = levels + size_t{t * abi::kKvTile + slot} * row_bytes;
      for (uint32_t b = 0; b < scales.count; ++b) {
        std::memcpy(to + padded.begin[b], tile + size_t{slot} * unpadded + scales.begin[b],
                    scales.size[b]);
        std::memset(to + padded.begin[b] + scales.size[b], 0, padded.size[b] - scales.size[b]);
      }
    }
  }
  return row_bytes;
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
