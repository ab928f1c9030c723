#pragma once
// A write in tiles: 8 slots of one head, those of K before those of V. A tile of rows of 128 is a
// warp's (warp_tile.cuh); otherwise a block takes as many tiles as fit (tile.cuh). Where, a type,
// says which token enters which slot: abi::SlotRun, a range of slots; abi::KvState, a cache's state
// in device memory; or the type of a list's slots. Heads come before tiles: a token's heads usually
// lie together in memory.
#include "abi/write.h"
#include "cuda/kernels/kernel_args.cuh"
#include "cuda/kernels/slots.cuh"
#include "cuda/kernels/tile.cuh"
#include "cuda/kernels/warp_tile.cuh"

namespace gyre::cuda {

// abi::WriteParams::where.
template <class Where>
inline constexpr uint32_t kWhereCode = abi::kWriteSlots;
template <>
inline constexpr uint32_t kWhereCode<abi::SlotRun> = abi::kWriteRange;
template <>
inline constexpr uint32_t kWhereCode<abi::KvState> = abi::kWriteState;

// A slot of a tile, and the token that enters it.
struct FoundToken {
  bool present;
  uint64_t token, tile;
};

// A range, or the run that a state gives.
struct RunTiles {
  const abi::SlotRun& run;

  // Whether the block has work; `first` is its first tile.
  __device__ bool begin(uint32_t first, uint32_t /*count*/) const { return first < run.tiles; }
  __device__ bool any(uint32_t /*first*/, uint32_t /*last*/) const { return true; }
  // UInt: what slots are counted in.
  template <class UInt>
  __device__ FoundToken find(uint32_t number, uint32_t nth) const {
    const UInt first = static_cast<UInt>(run.first_slot), all = static_cast<UInt>(run.all_tiles);
    UInt tile = static_cast<UInt>(run.first_tile) + number;
    if (tile >= all) tile -= all;
    const UInt slot = tile * abi::kKvTile + nth, capacity = static_cast<UInt>(run.capacity);
    const UInt token = slot - first + (slot < first ? capacity : 0);
    return {number < static_cast<UInt>(run.tiles) && slot < capacity &&
                token < static_cast<UInt>(run.tokens),
            static_cast<UInt>(run.first_token) + token, tile};
  }
  __device__ TileAddress address(const abi::KvCacheLayout& cache, const uint64_t* at, uint64_t tile,
                                 uint64_t head) const {
    return address_in_cache(cache, at, tile, head);
  }
  __device__ uint64_t alignment() const { return 0; }
};

// Which tokens the tiles of a block take.
struct ListShared {
  uint32_t last[kBlockWarps][abi::kKvTile];  // 1 + the last token for a slot; 0: none
  uint32_t leads[kBlockWarps];               // whether the token is the first of its tile
};

// Looks through the list for `count` tokens from `first` on. All threads of the block come.
template <class List>
__device__ void find_tokens(const List& list, uint32_t first, uint32_t count, ListShared& shared) {
  const auto tokens = static_cast<uint32_t>(list.tokens);  // at most abi::kWriteMaxTokens
  if (threadIdx.x < kBlockWarps * abi::kKvTile)
    shared.last[threadIdx.x / abi::kKvTile][threadIdx.x % abi::kKvTile] = 0;
  // The token before usually decides.
  if (threadIdx.x < count) {
    const uint32_t token = first + threadIdx.x;
    const uint64_t own = token < tokens ? list.tile(token) : abi::kNoTile;
    shared.leads[threadIdx.x] =
        own != abi::kNoTile && (token == 0 || list.tile(token - 1) != own) ? 1 : 0;
  }
  __syncthreads();
  for (uint32_t n = 0; n < count; ++n) {
    if (shared.leads[n] == 0) continue;
    const uint64_t begin = list.tile(first + n) * abi::kKvTile;
    bool earlier = false;
    for (uint32_t t = threadIdx.x; t < tokens; t += kBlockThreads) {
      const uint64_t slot = list.slot(t) - begin;
      if (slot >= abi::kKvTile) continue;
      earlier = earlier || t < first + n;
      atomicMax(&shared.last[n][slot], t + 1);
    }
    __syncthreads();
    if (earlier) shared.leads[n] = 0;
  }
  __syncthreads();
}

// A list of slots. Tokens that share a tile are one worker's, that of the first of them in the
// list; the workers of the others store nothing.
template <class Slot>
struct ListTiles {
  const abi::WriteParams& p;
  SlotList<Slot> list;
  ListShared& found;
  uint32_t first_token = 0;  // of the block

  __device__ bool begin(uint32_t first, uint32_t count) {
    first_token = first;
    find_tokens(list, first, count, found);
    return true;
  }
  // Whether one of the tiles has a leader.
  __device__ bool any(uint32_t first, uint32_t last) const {
    for (uint32_t token = first; token <= last; ++token)
      if (found.leads[token - first_token] != 0) return true;
    return false;
  }
  template <class UInt>
  __device__ FoundToken find(uint32_t leader, uint32_t nth) const {
    const uint32_t at = leader - first_token;
    // Selections, not a return: with two addresses to choose from, NVRTC does not come to an end.
    const bool leads = found.leads[at] != 0;
    const uint32_t last = leads ? found.last[at][nth] : 0;
    const uint64_t tile = list.tile(leads ? leader : 0);
    return {last != 0, last - 1, leads ? tile : 0};
  }
  __device__ TileAddress address(const abi::KvCacheLayout& cache, const uint64_t* at, uint64_t tile,
                                 uint64_t head) const {
    return address_in_page(p.pages, cache, at, tile, head);
  }
  __device__ uint64_t alignment() const { return p.pages.page_stride; }
};

// Tiles of one stream of a write.
template <class Source, class Tiles>
struct StreamTiles {
  const abi::WriteParams& p;
  const abi::WriteStream& s;
  const uint64_t* at;  // source, codes, scales
  Tiles& tiles;
  PlainRow<Source> row{nullptr, false};
  TileAddress address{};

  __device__ uint32_t tile_of(uint32_t index) const {
    return index / static_cast<uint32_t>(p.heads);
  }
  // The index-th tile, and slot `nth` of it.
  template <class UInt>
  __device__ void find(uint32_t index, uint32_t nth) {
    const uint32_t number = tile_of(index), head = index - number * static_cast<uint32_t>(p.heads);
    const FoundToken found = tiles.template find<UInt>(number, nth);
    const UInt token = found.present ? static_cast<UInt>(found.token) : 0;
    row = {
        pointer<const Source>(at[0] + head * s.source_head_stride + token * s.source_token_stride),
        found.present};
    address = tiles.address(s.cache, at, found.tile, head);
  }
  template <uint32_t kFormat>
  __device__ void copy(const TileThread& me, uint32_t lanes) const {
    if (!row.present()) return;
    auto* const to = reinterpret_cast<DenseType<kFormat>*>(
        address.codes + me.slot * (s.cache.codes_tile_stride / abi::kKvTile));
    copy_row(row.row, to, s.cache.head_dim, me.thread & (lanes - 1), lanes);
  }

  // What a block takes. Slots of a warp's tiles are below 2^32: more rows of 128 would take 136 GiB
  // for one head.
  template <uint32_t kFormat>
  __device__ void write(uint32_t block, TileShared& shared) {
    const abi::KvCacheLayout& cache = s.cache;
    const uint32_t dim = cache.head_dim, each = tiles_per_block(dim), first = block * each;
    if (!tiles.begin(tile_of(first), tile_of(first + each - 1) - tile_of(first) + 1)) return;
    if constexpr (abi::kv_is_native(kFormat)) {
      const uint64_t source = at[0] | s.source_token_stride | s.source_head_stride;
      if (is_warp_tile(cache, source | tiles.alignment(), at[1], at[2])) {
        find<uint32_t>(first + threadIdx.x / 32, WarpTile().slot);
        return quantize_warp_tile<kFormat>(shared, cache, address, row);
      }
    }
    const uint32_t lanes = tile_lanes(dim), at_once = tiles_at_once(dim);
    const TileThread me(lanes);
    for (uint32_t done = 0; done < each; done += at_once) {
      // Block-uniform.
      if (!tiles.any(tile_of(first + done), tile_of(first + done + at_once - 1))) continue;
      if (done != 0) __syncthreads();
      find<uint64_t>(first + done + me.tile, me.slot);
      if constexpr (abi::kv_is_native(kFormat) || abi::kv_is_mlx_native(kFormat)) {
        quantize_tile<kFormat>(shared, cache, address, row);
      } else {
        copy<kFormat>(me, lanes);
      }
    }
  }
};

template <class Source, uint32_t kFormat, class Where>
__device__ void write_stream(const abi::WriteParams& p, const Args& args, uint32_t stream,
                             uint32_t block, TileShared& shared) {
  const auto write = [&](auto tiles) {
    StreamTiles<Source, decltype(tiles)> work{p, p.stream[stream], args.at + stream_arg(0, stream),
                                              tiles};
    work.template write<kFormat>(block, shared);
  };
  if constexpr (is_same_type<Where, abi::SlotRun>) {
    write(RunTiles{p.run});
  } else if constexpr (is_same_type<Where, abi::KvState>) {
    const abi::KvState state = *pointer<const abi::KvState>(args.at[0]);
    const abi::SlotRun run = abi::append_run(p, state);
    write(RunTiles{run});
  } else {
    __shared__ ListShared found;
    write(ListTiles<Where>{p, slot_list<Where>(p, args.at[0]), found});
  }
}

// The blocks of K, then those of V. A range's format of 0: that half of the cache is not written.
// kCalibrated: streams whose source is calibrated rows, 1 K, 2 V; if both are, Source is
// CalibratedRow. Returns the number of blocks that it has work for.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Where, uint32_t kCalibrated>
__device__ uint32_t write_tiles(const abi::WriteParams& p, const Args& args) {
  constexpr bool kRange = is_same_type<Where, abi::SlotRun>;
  constexpr bool kHasK = kFormatK != 0 || !kRange, kHasV = kFormatV != 0 || !kRange;
  __shared__ TileShared shared;
  const uint32_t tiles = write_tile_count(kWhereCode<Where>, p);
  const uint32_t blocks_k = kHasK ? write_blocks(p, 0, tiles) : 0;
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint32_t block = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  if constexpr (is_same_type<Where, abi::KvState>) {
    const uint32_t all = blocks_k + write_blocks(p, 1, tiles);
    if (blockIdx.x >= all) return all;
  }
  using SourceK = SourceOf<Source, kCalibrated, 0>;
  using SourceV = SourceOf<Source, kCalibrated, 1>;
  if constexpr (kFormatK == kFormatV && kCalibrated == 0) {
    write_stream<Source, kFormatK, Where>(p, args, stream, block, shared);
  } else if (stream == 0) {
    if constexpr (kHasK) write_stream<SourceK, kFormatK, Where>(p, args, 0, block, shared);
  } else if constexpr (kHasV) {
    write_stream<SourceV, kFormatV, Where>(p, args, 1, block, shared);
  }
  return gridDim.x;
}

}  // namespace gyre::cuda
