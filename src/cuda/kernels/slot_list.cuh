#pragma once
// Where the tokens of a list of slots go, in pages.
#include "abi/kv_write.h"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/tile_shared.cuh"

namespace gyre::cuda {

// The list of slots, which may hold anything.
template <class Slot>
struct SlotList {
  static constexpr uint64_t kNoTile = ~uint64_t{0};
  static constexpr uint32_t kMostSkipped = 64;  // between tokens of one tile, see kv_pages.h
  const Slot* slots;
  uint64_t tokens, all;

  __device__ SlotList(const abi::KvWriteParams& p, uint64_t address)
      : slots(pointer<const Slot>(address)), tokens(p.tokens), all(p.pages * p.page_tokens) {}

  __device__ uint64_t slot(uint64_t token) const {
    return static_cast<uint64_t>(static_cast<int64_t>(slots[token]));
  }
  __device__ uint64_t tile(uint64_t token) const {
    const uint64_t s = slot(token);
    return s < all ? s / abi::kKvTile : kNoTile;  // negative ones are far above
  }
  // The tile of the token before, tokens that are skipped left out.
  __device__ uint64_t tile_before(uint64_t token) const {
    uint64_t found = kNoTile;
    for (uint32_t gap = 0; gap <= kMostSkipped && token != 0 && found == kNoTile; ++gap)
      found = tile(--token);
    return found;
  }
  // Whether the token is the first of those that follow each other into its tile.
  __device__ bool leads(uint64_t token) const {
    if (token >= tokens) return false;
    const uint64_t mine = tile(token);
    return mine != kNoTile && tile_before(token) != mine;
  }
  // Of the leader's tile: the last token for its slot `nth`, or `tokens` if there is none.
  __device__ uint64_t find(uint64_t leader, uint64_t tile_index, uint32_t nth) const {
    uint64_t found = tokens;
    uint32_t gap = 0;
    for (uint64_t t = leader; t < tokens && gap <= kMostSkipped; ++t) {
      const uint64_t at = tile(t);
      gap = at == kNoTile ? gap + 1 : 0;
      if (at == kNoTile) continue;
      if (at != tile_index) break;
      if (slot(t) % abi::kKvTile == nth) found = t;
    }
    return found;
  }
};

// 32 bits where they are enough: a 64-bit division takes ten times as long.
__device__ inline uint64_t page_of_tile(uint64_t tile, uint32_t page_tiles) {
  return tile >> 32 == 0 ? static_cast<uint32_t>(tile) / page_tiles : tile / page_tiles;
}

// A tile of the pages, for one head. at: source, codes, scales.
__device__ inline TilePlace place_in_page(const abi::KvWriteParams& p,
                                          const abi::KvCacheLayout& cache, const uint64_t* at,
                                          uint64_t tile, uint64_t head) {
  const uint32_t page_tiles = p.page_tokens / abi::kKvTile;
  const uint64_t page = page_of_tile(tile, page_tiles), in_page = tile - page * page_tiles;
  const uint64_t offset = page * p.page_stride;
  return {pointer<uint8_t>(at[1] + offset + head * cache.codes_head_stride +
                           in_page * cache.codes_tile_stride),
          pointer<uint8_t>(at[2] + offset + head * cache.scales_head_stride +
                           in_page * cache.scales_tile_stride)};
}

}  // namespace gyre::cuda
