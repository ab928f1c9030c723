// kv_write: tokens go to the slots that a list names, in pages. kv_page_copy: whole pages.
// kv_write works on tiles (8 slots of one head), those of K before those of V, as kv_quantize does.
// Neighbours in the list that share a tile are one worker's, that of the first of them; the workers
// of the others return. The grid is made for a tile to every token. Every source byte is read once,
// every code written once; codes of V that share words with old ones are read, too.
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/slot_list.cuh"
#include "cuda/kernels/tile.cuh"
#include "cuda/kernels/warp_tile.cuh"

namespace gyre::cuda {

// Tiles of one stream. Heads come before tokens: a token's heads usually lie together in memory.
template <class Source, class Slot>
struct WriteStream {
  const abi::KvWriteParams& p;
  const abi::KvQuantizeStream& s;
  const uint64_t* at;  // source, codes, scales
  SlotList<Slot> list;
  PlainRow<Source> row{nullptr, false};
  TilePlace place{};

  __device__ uint64_t token_of(uint64_t index) const {
    return index >> 32 == 0 ? static_cast<uint32_t>(index) / static_cast<uint32_t>(p.heads)
                            : index / p.heads;
  }
  // Whether one of `count` tiles from the index-th on has a leader.
  __device__ bool any(uint64_t index, uint32_t count) const {
    const uint64_t last = token_of(index + count - 1);
    for (uint64_t token = token_of(index); token <= last; ++token)
      if (list.leads(token)) return true;
    return false;
  }
  // The index-th tile, and slot `nth` of it.
  __device__ void find(uint64_t index, uint32_t nth) {
    const uint64_t leader = token_of(index), head = index - leader * p.heads;
    row = {pointer<const Source>(at[0]), false};
    place = {pointer<uint8_t>(at[1]), pointer<uint8_t>(at[2])};
    if (!list.leads(leader)) return;
    const uint64_t tile = list.tile(leader), token = list.find(leader, tile, nth);
    row.is_present = token < p.tokens;
    row.row = pointer<const Source>(at[0] + (row.is_present ? token : 0) * s.source_token_stride +
                                    head * s.source_head_stride);
    place = place_in_page(p, s.cache, at, tile, head);
  }
  template <uint32_t kFormat>
  __device__ void copy(const TileThread& me, uint32_t lanes) const {
    if (!row.present()) return;
    auto* const to = reinterpret_cast<typename DenseType<kFormat>::Type*>(
        place.codes + me.slot * (s.cache.codes_tile_stride / abi::kKvTile));
    copy_row(row.row, to, s.cache.head_dim, me.thread & (lanes - 1), lanes);
  }
};

template <class Source, class Slot, uint32_t kFormat>
__device__ void write_stream(const abi::KvWriteParams& p, const Args& args, uint32_t stream,
                             uint32_t block, TileShared& shared) {
  const abi::KvCacheLayout& cache = p.stream[stream].cache;
  const uint32_t dim = cache.head_dim, each = tiles_per_block(dim);
  const uint64_t first = uint64_t{block} * each;
  WriteStream<Source, Slot> work{p, p.stream[stream], args.at + 3 * stream,
                                 SlotList<Slot>(p, args.at[6])};
  if constexpr (abi::kv_is_native(kFormat)) {
    const uint64_t source = work.at[0] | work.s.source_token_stride | work.s.source_head_stride;
    if (is_warp_tile(cache, source | p.page_stride, work.at[1], work.at[2])) {
      work.find(first + threadIdx.x / 32, WarpTile().slot);
      return quantize_warp_tile<kFormat>(shared, cache, work.place, work.row);
    }
  }
  const uint32_t lanes = tile_lanes(dim), at_once = tiles_at_once(dim);
  const TileThread me(lanes);
  for (uint32_t done = 0; done < each; done += at_once) {
    if (!work.any(first + done, at_once)) continue;  // the same for the whole block
    __syncthreads();
    work.find(first + done + me.tile, me.slot);
    if constexpr (abi::kv_is_native(kFormat) || abi::kv_is_compat(kFormat)) {
      quantize_tile<kFormat>(shared, cache, work.place, work.row);
    } else {
      work.template copy<kFormat>(me, lanes);
    }
  }
}

// kCoded: as kv_quantize has it.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Slot, uint32_t kCoded = 0>
__global__ void __launch_bounds__(kBlockThreads)
    kv_write(const __grid_constant__ abi::KvWriteParams p, const __grid_constant__ Args args) {
  __shared__ TileShared shared;
  pdl_wait();
  pdl_launch_dependents();
  const auto blocks_k = static_cast<uint32_t>(write_blocks(p, 0));
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint32_t block = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  if constexpr (kFormatK == kFormatV && kCoded == 0) {
    write_stream<Source, Slot, kFormatK>(p, args, stream, block, shared);
  } else if (stream == 0) {
    write_stream<SourceOf<Source, kCoded, 0>, Slot, kFormatK>(p, args, 0, block, shared);
  } else {
    write_stream<SourceOf<Source, kCoded, 1>, Slot, kFormatV>(p, args, 1, block, shared);
  }
}

// Page from[i] to page to[i], 16 bytes a thread, four on their way. Pairs with a page that is not
// there are skipped.
__global__ void __launch_bounds__(kBlockThreads)
    kv_page_copy(const abi::KvPageCopyParams p, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  constexpr uint32_t kEach = kPageCopyBytes / kBlockThreads / sizeof(uint4);
  const uint64_t parts = page_copy_parts(p), vectors = p.page_bytes / sizeof(uint4);
  for (uint64_t i = blockIdx.x; i < p.count * parts; i += gridDim.x) {
    const uint64_t pair = i / parts, first = (i - pair * parts) * kEach * kBlockThreads;
    const int32_t from = pointer<const int32_t>(args.at[1])[pair];
    const int32_t to = pointer<const int32_t>(args.at[2])[pair];
    if (from < 0 || to < 0 || static_cast<uint64_t>(from) >= p.pages ||
        static_cast<uint64_t>(to) >= p.pages)
      continue;
    const auto* const source =
        pointer<const uint4>(args.at[0] + static_cast<uint64_t>(from) * p.page_stride);
    auto* const target = pointer<uint4>(args.at[0] + static_cast<uint64_t>(to) * p.page_stride);
    uint4 words[kEach];
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      const uint64_t v = first + e * kBlockThreads + threadIdx.x;
      if (v < vectors) words[e] = source[v];
    }
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      const uint64_t v = first + e * kBlockThreads + threadIdx.x;
      if (v < vectors) target[v] = words[e];
    }
  }
}

}  // namespace gyre::cuda
