// kv_write: tokens go to the slots that a list names, in pages.
// kv_write_rows, for few tokens: a warp writes a row of K or V (quad_row.cuh, store_quads.cuh).
// Only the rows themselves come from the command ahead: the list and the old words of V's tiles are
// read before pdl_wait where Args::early allows it. kv_write, for others, works on tiles (8 slots
// of one head), those of K before those of V, as kv_quantize does. Tokens that share a tile are one
// worker's, that of the first of them in the list; the workers of the others return. The grid is
// made for a tile to every token. Every source byte is read once, every code written once; codes of
// V that share words with old ones are read, too.
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/tile.cuh"
#include "cuda/kernels/warp_tile.cuh"
#include "cuda/kernels/write_target.cuh"

namespace gyre::cuda {

constexpr uint32_t kSlotsArg = 6;

template <class Source, class Slot, uint32_t kFormat, uint32_t kQuads>
__device__ void write_row(const abi::KvWriteParams& p, const EarlyArgs& args, uint32_t stream,
                          uint32_t row) {
  const abi::KvQuantizeStream& s = p.stream[stream];
  const uint64_t* const at = args.at + 3 * stream;
  const auto heads = static_cast<uint32_t>(p.heads);
  const uint32_t token = row / heads, head = row - token * heads;
  const QuadPlace<kQuads> place(s.cache.head_dim);
  const bool is_v = s.cache.role == kRoleV;
  const uint32_t bits = 1u << kSlotsArg | (is_v ? 2u << 3 * stream : 0);
  const bool early = (args.early & bits) == bits;
  if (!early) pdl_wait();
  const RowTarget to = write_target<Slot>(p, {stream, token, head, at}, args.at[kSlotsArg]);
  OldCodes<kFormat, kQuads> old;
  if (is_v && to.stored) old.load(place, to.tile.codes);
  if (early) pdl_wait();
  if (!to.stored) return;
  const RawQuads<Source, kQuads> raw(
      place,
      pointer<const Source>(at[0] + token * s.source_token_stride + head * s.source_head_stride));
  store_quads<kFormat>(s.cache, place, raw, old, to);
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Slot, uint32_t kQuads>
__global__ void __launch_bounds__(32 * kWriteRows)
    kv_write_rows(const __grid_constant__ abi::KvWriteParams p,
                  const __grid_constant__ EarlyArgs args) {
  pdl_launch_dependents();
  const uint32_t row = blockIdx.x * kWriteRows + threadIdx.x / 32;
  const auto rows = static_cast<uint32_t>(p.heads * p.tokens);
  const uint32_t stream = row < rows ? 0 : 1;
  if (row >= 2 * rows) {
    pdl_wait();
  } else if constexpr (kFormatK == kFormatV) {
    write_row<Source, Slot, kFormatK, kQuads>(p, args, stream, row - stream * rows);
  } else if (stream == 0) {
    write_row<Source, Slot, kFormatK, kQuads>(p, args, 0, row);
  } else {
    write_row<Source, Slot, kFormatV, kQuads>(p, args, 1, row - rows);
  }
}

// Which tokens the tiles of a block take.
struct ListShared {
  uint32_t last[kBlockWarps][abi::kKvTile];  // 1 + the last token for a slot; 0: none
  uint32_t leads[kBlockWarps];               // whether the token is the first of its tile
};

// Looks through the list for `count` tokens from `first` on. All threads of the block come.
template <class Slot>
__device__ void find_tokens(const SlotList<Slot>& list, uint32_t first, uint32_t count,
                            ListShared& shared) {
  if (threadIdx.x < kBlockWarps * abi::kKvTile)
    shared.last[threadIdx.x / abi::kKvTile][threadIdx.x % abi::kKvTile] = 0;
  // The token before usually decides.
  if (threadIdx.x < count) {
    const uint32_t token = first + threadIdx.x;
    const uint64_t own = token < list.tokens ? list.tile(token) : list.kNoTile;
    shared.leads[threadIdx.x] =
        own != list.kNoTile && (token == 0 || list.tile(token - 1) != own) ? 1 : 0;
  }
  __syncthreads();
  for (uint32_t n = 0; n < count; ++n) {
    if (shared.leads[n] == 0) continue;
    const uint64_t begin = list.tile(first + n) * abi::kKvTile;
    bool earlier = false;
    for (uint32_t t = threadIdx.x; t < list.tokens; t += kBlockThreads) {
      const uint64_t place = list.slot(t) - begin;
      if (place >= abi::kKvTile) continue;
      earlier = earlier || t < first + n;
      atomicMax(&shared.last[n][place], t + 1);
    }
    __syncthreads();
    if (earlier) shared.leads[n] = 0;
  }
  __syncthreads();
}

// Tiles of one stream. Heads come before tokens: a token's heads usually lie together in memory.
template <class Source, class Slot>
struct WriteStream {
  const abi::KvWriteParams& p;
  const abi::KvQuantizeStream& s;
  const uint64_t* at;  // source, codes, scales
  SlotList<Slot> list;
  const ListShared& found;
  uint32_t first;  // token of the block
  PlainRow<Source> row{nullptr, false};
  TilePlace place{};

  __device__ uint32_t token_of(uint32_t index) const {
    return index / static_cast<uint32_t>(p.heads);
  }
  // Whether one of `count` tiles from the index-th on has a leader.
  __device__ bool any(uint32_t index, uint32_t count) const {
    const uint32_t last = token_of(index + count - 1);
    for (uint32_t token = token_of(index); token <= last; ++token)
      if (found.leads[token - first] != 0) return true;
    return false;
  }
  // The index-th tile, and slot `nth` of it.
  __device__ void find(uint32_t index, uint32_t nth) {
    const uint32_t leader = token_of(index);
    const uint64_t head = index - leader * static_cast<uint32_t>(p.heads);
    row = {pointer<const Source>(at[0]), false};
    place = {pointer<uint8_t>(at[1]), pointer<uint8_t>(at[2])};
    if (found.leads[leader - first] == 0) return;
    const uint32_t last = found.last[leader - first][nth];
    row.is_present = last != 0;
    row.row =
        pointer<const Source>(at[0] + uint64_t{last != 0 ? last - 1 : 0} * s.source_token_stride +
                              head * s.source_head_stride);
    place = place_in_page(p, s.cache, at, list.tile(leader), head);
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
  __shared__ ListShared found;
  const abi::KvCacheLayout& cache = p.stream[stream].cache;
  const uint32_t dim = cache.head_dim, each = tiles_per_block(dim), first = block * each;
  const auto heads = static_cast<uint32_t>(p.heads);
  WriteStream<Source, Slot> work{
      p,     p.stream[stream], args.at + 3 * stream, SlotList<Slot>(p, args.at[kSlotsArg]),
      found, first / heads};
  find_tokens(work.list, work.first, work.token_of(first + each - 1) - work.first + 1, found);
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
    if constexpr (abi::kv_is_native(kFormat) || abi::kv_is_mlx_native(kFormat)) {
      quantize_tile<kFormat>(shared, cache, work.place, work.row);
    } else {
      work.template copy<kFormat>(me, lanes);
    }
  }
}

// kCalibrated: as kv_quantize has it.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, class Slot, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads)
    kv_write(const __grid_constant__ abi::KvWriteParams p, const __grid_constant__ Args args) {
  __shared__ TileShared shared;
  pdl_wait();
  pdl_launch_dependents();
  const auto blocks_k = static_cast<uint32_t>(write_blocks(p, 0));
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint32_t block = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  if constexpr (kFormatK == kFormatV && kCalibrated == 0) {
    write_stream<Source, Slot, kFormatK>(p, args, stream, block, shared);
  } else if (stream == 0) {
    write_stream<SourceOf<Source, kCalibrated, 0>, Slot, kFormatK>(p, args, 0, block, shared);
  } else {
    write_stream<SourceOf<Source, kCalibrated, 1>, Slot, kFormatV>(p, args, 1, block, shared);
  }
}

}  // namespace gyre::cuda
