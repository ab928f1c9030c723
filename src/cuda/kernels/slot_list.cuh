#pragma once
// Where the tokens of a list of slots go, in pages. The list is device data, may hold anything and
// has any order. Of two tokens for one slot the later is kept.
#include "abi/kv_write.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/tile_place.cuh"

namespace gyre::cuda {

template <class Slot>
struct SlotList {
  static constexpr uint64_t kNoTile = ~uint64_t{0};
  const Slot* slots;
  uint32_t tokens;  // at most abi::kWriteMaxTokens
  uint64_t all;     // slots of the pages

  __device__ SlotList(const abi::KvWriteParams& p, uint64_t address)
      : slots(pointer<const Slot>(address)),
        tokens(static_cast<uint32_t>(p.tokens)),
        all(p.pages * p.page_tokens) {}

  __device__ uint64_t slot(uint32_t token) const {
    return static_cast<uint64_t>(static_cast<int64_t>(slots[token]));
  }
  __device__ uint64_t tile(uint32_t token) const {
    const uint64_t s = slot(token);
    return s < all ? s / abi::kKvTile : kNoTile;  // negative ones are far above
  }
};

// What a warp finds out about a token.
struct FoundSlot {
  uint64_t slot;
  bool stored;  // it is in the pages, and no later token has it
  bool shared;  // another token goes to the same tile
};

template <class Slot>
__device__ FoundSlot find_slot(const SlotList<Slot>& list, uint32_t token) {
  const uint64_t mine = list.slot(token);
  uint32_t later = 0, other = 0;
#pragma unroll 1
  for (uint32_t t = threadIdx.x % 32; t < list.tokens; t += 32) {
    const uint64_t s = list.slot(t);
    if (t > token && s == mine) later = 1;
    if (t != token && s / abi::kKvTile == mine / abi::kKvTile) other = 1;
  }
  const bool stored = mine < list.all && __any_sync(kAllLanes, later) == 0;
  return {stored ? mine : 0, stored, __any_sync(kAllLanes, other) != 0};
}

// A tile of the pages, for one head. at: source, codes, scales. There are less than 2^38 tiles, of
// which a page has up to 128: two short divisions are shorter than one of 64 bits.
__device__ inline TilePlace place_in_page(const abi::KvWriteParams& p,
                                          const abi::KvCacheLayout& cache, const uint64_t* at,
                                          uint64_t tile, uint64_t head) {
  const uint32_t page_tiles = p.page_tokens / abi::kKvTile;
  const auto high = static_cast<uint32_t>(tile >> 16);
  const uint32_t first = high / page_tiles;
  const uint32_t left = (high - first * page_tiles) << 16 | static_cast<uint32_t>(tile & 0xFFFFu);
  const uint32_t rest = left / page_tiles, in_page = left - rest * page_tiles;
  const uint64_t offset = ((uint64_t{first} << 16) + rest) * p.page_stride;
  return {pointer<uint8_t>(at[1] + offset + head * cache.codes_head_stride +
                           in_page * cache.codes_tile_stride),
          pointer<uint8_t>(at[2] + offset + head * cache.scales_head_stride +
                           in_page * cache.scales_tile_stride)};
}

}  // namespace gyre::cuda
