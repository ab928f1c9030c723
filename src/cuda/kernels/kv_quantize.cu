// kv_quantize and kv_dequantize: rows of [token, head] to codes and scales, and back.
// A block is 256 threads and works on tiles (8 slots of one head). A tile of rows of 128 is a
// warp's (warp_tile.cuh); otherwise 8 rows, each by 4 to 32 lanes of a warp, 16 (beyond 512
// coordinates 32) coordinates a lane. Blocks of K come first, then those of V. Every source byte is
// read once, every code written once; codes of V that share words with old ones are read, too.
#include "abi/kv_codec.h"
#include "abi/kv_dequantize.h"
#include "abi/kv_quantize.h"
#include "cuda/kernels/dequantize.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/tile.cuh"
#include "cuda/kernels/warp_tile.cuh"

namespace gyre::cuda {

// Tiles of one stream. Heads come before tiles: a token's heads usually lie together in memory.
template <class Source>
struct QuantizeStream {
  const abi::KvQuantizeParams& p;
  const abi::KvQuantizeStream& s;
  const uint64_t* at;  // source, codes, scales
  PlainRow<Source> row{nullptr, false};
  TilePlace place{};

  // The index-th tile, and slot `nth` of it.
  __device__ void find(uint32_t index, uint32_t nth) {
    const uint32_t heads = static_cast<uint32_t>(p.heads);
    const uint32_t run = index / heads, head = index - run * heads;
    uint64_t tile = p.first_tile + run;
    if (tile >= p.all_tiles) tile -= p.all_tiles;
    const uint64_t slot = tile * abi::kKvTile + nth;
    const uint64_t token =
        slot >= p.first_slot ? slot - p.first_slot : slot + p.capacity - p.first_slot;
    row.is_present = run < p.tiles && slot < p.capacity && token < p.tokens;
    row.row = pointer<const Source>(at[0] + (row.is_present ? token : 0) * s.source_token_stride +
                                    head * s.source_head_stride);
    place.codes = pointer<uint8_t>(at[1] + head * s.cache.codes_head_stride +
                                   tile * s.cache.codes_tile_stride);
    place.scales = pointer<uint8_t>(at[2] + head * s.cache.scales_head_stride +
                                    tile * s.cache.scales_tile_stride);
  }
};

// A tile that a warp takes alone. Slots are below 2^32: so many rows of 128 do not fit into any
// memory.
template <class Source, uint32_t kFormat>
__device__ void quantize_alone(const abi::KvQuantizeParams& p, const abi::KvQuantizeStream& s,
                               const uint64_t* at, uint32_t index, TileShared& shared) {
  const auto heads = static_cast<uint32_t>(p.heads), all = static_cast<uint32_t>(p.all_tiles);
  const auto capacity = static_cast<uint32_t>(p.capacity);
  const auto first = static_cast<uint32_t>(p.first_slot);
  const uint32_t run = index / heads, head = index - run * heads;
  if (run >= static_cast<uint32_t>(p.tiles)) return;
  uint32_t tile = static_cast<uint32_t>(p.first_tile) + run;
  if (tile >= all) tile -= all;
  const uint32_t slot = tile * abi::kKvTile + WarpTile().slot;
  const uint32_t token = slot - first + (slot < first ? capacity : 0);
  const bool present = slot < capacity && token < static_cast<uint32_t>(p.tokens);
  const PlainRow<Source> row{pointer<const Source>(at[0] + head * s.source_head_stride +
                                                   (present ? token : 0) * s.source_token_stride),
                             present};
  const TilePlace place{
      pointer<uint8_t>(at[1] + head * s.cache.codes_head_stride + tile * s.cache.codes_tile_stride),
      pointer<uint8_t>(at[2] + head * s.cache.scales_head_stride +
                       tile * s.cache.scales_tile_stride)};
  quantize_warp_tile<kFormat>(shared, s.cache, place, row);
}

template <class Source, uint32_t kFormat>
__device__ void quantize_stream(const abi::KvQuantizeParams& p, const Args& args, uint32_t stream,
                                uint32_t block, TileShared& shared) {
  QuantizeStream<Source> work{p, p.stream[stream], args.at + 3 * stream};
  const abi::KvCacheLayout& cache = work.s.cache;
  if constexpr (abi::kv_is_native(kFormat)) {
    const uint64_t source = work.at[0] | work.s.source_token_stride | work.s.source_head_stride;
    if (is_warp_tile(cache, source, work.at[1], work.at[2]))
      return quantize_alone<Source, kFormat>(p, work.s, work.at,
                                             block * kBlockWarps + threadIdx.x / 32, shared);
  }
  const uint32_t each = tiles_per_block(cache.head_dim), first = block * each;
  const TileThread me(tile_lanes(cache.head_dim));
  for (uint32_t done = 0; done < each; done += tiles_at_once(cache.head_dim)) {
    if (done != 0) __syncthreads();
    work.find(first + done + me.tile, me.slot);
    quantize_tile<kFormat>(shared, cache, work.place, work.row);
  }
}

// A format of 0: that half of the cache is not written. kCalibrated: streams whose source is
// calibrated rows, 1 K, 2 V; if both are, Source is CalibratedRow.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads, 4)
    kv_quantize(const __grid_constant__ abi::KvQuantizeParams p,
                const __grid_constant__ Args args) {
  __shared__ TileShared shared;
  pdl_wait();
  pdl_launch_dependents();
  const uint32_t blocks_k = kFormatK != 0 ? quantize_blocks(p, 0) : 0;
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint32_t block = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  using SourceK = SourceOf<Source, kCalibrated, 0>;
  using SourceV = SourceOf<Source, kCalibrated, 1>;
  if constexpr (kFormatK == kFormatV && kCalibrated == 0) {
    quantize_stream<Source, kFormatK>(p, args, stream, block, shared);
  } else if (stream == 0) {
    if constexpr (kFormatK != 0) quantize_stream<SourceK, kFormatK>(p, args, 0, block, shared);
  } else if constexpr (kFormatV != 0) {
    quantize_stream<SourceV, kFormatV>(p, args, 1, block, shared);
  }
}

template <class Out, uint32_t kFormat, uint32_t kSlots>
__device__ void dequantize_rows(const abi::KvDequantizeParams& p, const Args& args) {
  const RowPlace<kSlots> at(p.cache.head_dim);
  const uint64_t unit = uint64_t{blockIdx.x} * (kBlockThreads / at.lanes) + threadIdx.x / at.lanes;
  // Slots of a tile side by side: they share V's words.
  const uint64_t first_tile = p.first_slot / abi::kKvTile;
  const uint64_t run = unit / abi::kKvTile, heads = p.heads;
  const uint64_t tile = first_tile + run / heads, head = run % heads;
  const uint64_t slot = tile * abi::kKvTile + unit % abi::kKvTile;
  const bool present = slot >= p.first_slot && slot < p.first_slot + p.tokens;
  float y[kSlots][kChunk] = {};
  if (present) {
    decode_row<kFormat>(p.cache, at,
                        {pointer<const uint8_t>(args.at[0] + head * p.cache.codes_head_stride +
                                                tile * p.cache.codes_tile_stride),
                         pointer<const uint8_t>(args.at[1] + head * p.cache.scales_head_stride +
                                                tile * p.cache.scales_tile_stride),
                         static_cast<uint32_t>(unit % abi::kKvTile)},
                        y);
  }
  if (p.rotated == 0) {
    transform<false>(at, y);
    scale_transformed(at, y);
    if constexpr (abi::kv_is_native(kFormat)) {
      flip_signs(at, kNativeSigns, y);
    } else if (mlx_native_is_signed(p.cache.head_dim)) {
      flip_signs(at, kMlxNativeSigns, y);
    }
  }
  if (!present) return;
  Out* const out = pointer<Out>(args.at[2] + (slot - p.first_slot) * p.out_token_stride +
                                head * p.out_head_stride);
  if constexpr (kFormat == abi::kMlxNative4) {
    if (p.cache.head_dim < kChunk) return store_short_row(at, y, out);
  }
  store_row(at, y, out);
}

template <class Out, uint32_t kFormat>
__global__ void __launch_bounds__(kBlockThreads)
    kv_dequantize(const __grid_constant__ abi::KvDequantizeParams p,
                  const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  if constexpr (abi::kv_is_native(kFormat) || kFormat == abi::kMlxNative4) {
    if (takes_many_slots(p.cache.head_dim))
      return dequantize_rows<Out, kFormat, kManySlots>(p, args);
  }
  dequantize_rows<Out, kFormat, kFewSlots>(p, args);
}

}  // namespace gyre::cuda
