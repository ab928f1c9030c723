// kv_quantize and kv_dequantize: rows of [token, head] to codes and scales, and back.
// A block is 256 threads and works on tiles (8 slots of one head): 8 rows, each by 4 to 32 lanes of
// a warp, 16 (beyond 512 coordinates 32) coordinates a lane. Blocks of K come first, then those of
// V. Every source byte is read once, every code written once; codes of V that share words with old
// ones are read, too.
#include "abi/kv_quantize.h"
#include "cuda/kernels/args.cuh"
#include "cuda/kernels/decode.cuh"
#include "cuda/kernels/tile.cuh"

namespace gyre::cuda {

template <class Source, uint32_t kFormat>
__device__ void quantize_stream(const abi::KvQuantizeParams& p, const Args& args, uint32_t stream,
                                uint32_t block, TileShared& shared) {
  const abi::KvQuantizeStream& s = p.stream[stream];
  const uint32_t lanes = tile_lanes(s.cache.head_dim);
  const TileThread me(lanes);
  // Heads come before tiles: a token's heads usually lie together in memory.
  const uint32_t index = block * (kBlockThreads / (abi::kKvTile * lanes)) + me.tile;
  const uint32_t heads = static_cast<uint32_t>(p.heads);
  const uint32_t run = index / heads, head = index % heads;
  uint64_t tile = p.first_tile + run;
  if (tile >= p.all_tiles) tile -= p.all_tiles;
  const uint64_t slot = tile * abi::kKvTile + me.slot;
  const uint64_t token =
      slot >= p.first_slot ? slot - p.first_slot : slot + p.capacity - p.first_slot;
  const uint64_t* const at = args.at + 3 * stream;
  PlainRow<Source> row{nullptr};
  if (run < p.tiles && slot < p.capacity && token < p.tokens)
    row.row =
        pointer<const Source>(at[0] + token * s.source_token_stride + head * s.source_head_stride);
  const TilePlace place{
      pointer<uint8_t>(at[1] + head * s.cache.codes_head_stride + tile * s.cache.codes_tile_stride),
      pointer<uint8_t>(at[2] + head * s.cache.scales_head_stride +
                       tile * s.cache.scales_tile_stride)};
  quantize_tile<kFormat>(shared, s.cache, place, row);
}

template <class Source, uint32_t kFormatK, uint32_t kFormatV>
__global__ void __launch_bounds__(kBlockThreads)
    kv_quantize(const __grid_constant__ abi::KvQuantizeParams p,
                const __grid_constant__ Args args) {
  wait_for_earlier();
  __shared__ TileShared shared;
  const uint32_t per_block = tiles_per_block(p.stream[0].cache.head_dim);
  const uint64_t blocks_k = (p.heads * p.tiles + per_block - 1) / per_block;
  if (blockIdx.x < blocks_k) {
    quantize_stream<Source, kFormatK>(p, args, 0, blockIdx.x, shared);
  } else if constexpr (kFormatV != 0) {
    quantize_stream<Source, kFormatV>(p, args, 1, blockIdx.x - static_cast<uint32_t>(blocks_k),
                                      shared);
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
    } else if (compat_is_signed(p.cache.head_dim)) {
      flip_signs(at, kCompatSigns, y);
    }
  }
  if (present)
    store_row(at, y,
              pointer<Out>(args.at[2] + (slot - p.first_slot) * p.out_token_stride +
                           head * p.out_head_stride));
}

template <class Out, uint32_t kFormat>
__global__ void __launch_bounds__(kBlockThreads)
    kv_dequantize(const __grid_constant__ abi::KvDequantizeParams p,
                  const __grid_constant__ Args args) {
  wait_for_earlier();
  if constexpr (abi::kv_is_native(kFormat)) {
    if (takes_many_slots(p.cache.head_dim))
      return dequantize_rows<Out, kFormat, kManySlots>(p, args);
  }
  dequantize_rows<Out, kFormat, kFewSlots>(p, args);
}

}  // namespace gyre::cuda
