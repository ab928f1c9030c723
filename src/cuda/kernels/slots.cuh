#pragma once
// Arguments of a write, and where tiles lie in a cache or in its pages.
#include "abi/write.h"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/tile_address.cuh"

namespace gyre::cuda {

// Addresses of a stream: source, codes, scales, sink tokens and tail.
constexpr uint32_t stream_arg(uint32_t where_arg, uint32_t stream) {
  return where_arg + 1 + 4 * stream;
}

template <class Slot>
struct GlobalSlots {
  const Slot* at;
  __device__ uint64_t operator()(uint64_t token) const {
    return static_cast<uint64_t>(static_cast<int64_t>(at[token]));
  }
};
template <class Slot>
using SlotList = abi::SlotList<GlobalSlots<Slot>>;
template <class Slot>
__device__ SlotList<Slot> slot_list(const abi::WriteParams& p, uint64_t address) {
  return {{pointer<const Slot>(address)}, p.tokens, p.pages.pages * p.pages.page_tokens};
}

__device__ inline TileAddress address_in_cache(const abi::KvCacheLayout& cache, const uint64_t* at,
                                               uint64_t tile, uint64_t head) {
  return {
      pointer<uint8_t>(at[1] + head * cache.codes_head_stride + tile * cache.codes_tile_stride),
      pointer<uint8_t>(at[2] + head * cache.scales_head_stride + tile * cache.scales_tile_stride)};
}

// A tile of the pages, for one head. at: source, codes, scales. There are less than 2^38 tiles, of
// which a page has up to 128: two short divisions are shorter than one of 64 bits.
__device__ inline TileAddress address_in_page(const abi::WritePages& p,
                                              const abi::KvCacheLayout& cache, const uint64_t* at,
                                              uint64_t tile, uint64_t head) {
  const uint32_t page_tiles = p.page_tokens / abi::kKvTile;
  const auto high = static_cast<uint32_t>(tile >> 16);
  const uint32_t first = high / page_tiles;
  const uint32_t left = (high - first * page_tiles) << 16 | static_cast<uint32_t>(tile & 0xFFFFu);
  const uint32_t remainder = left / page_tiles, in_page = left - remainder * page_tiles;
  const uint64_t offset = ((uint64_t{first} << 16) + remainder) * p.page_stride;
  return {pointer<uint8_t>(at[1] + offset + head * cache.codes_head_stride +
                           in_page * cache.codes_tile_stride),
          pointer<uint8_t>(at[2] + offset + head * cache.scales_head_stride +
                           in_page * cache.scales_tile_stride)};
}

}  // namespace gyre::cuda
