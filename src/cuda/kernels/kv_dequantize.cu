// kv_dequantize: codes and scales back to rows of [token, head]. A row is 4 to 32 lanes of a warp,
// 16 (beyond 512 coordinates 32) coordinates a lane. Every code is read once, every row written
// once.
#include "abi/kv_codec.h"
#include "abi/kv_dequantize.h"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/dequantize.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

template <class Out, uint32_t kFormat, uint32_t kSlots>
__device__ void dequantize_rows(const abi::KvDequantizeParams& p, const Args& args) {
  const RowPlace<kSlots> at(p.cache.head_dim);
  const uint64_t item = uint64_t{blockIdx.x} * (kBlockThreads / at.lanes) + threadIdx.x / at.lanes;
  // Slots of a tile side by side: they share V's words.
  const uint64_t first_tile = p.first_slot / abi::kKvTile;
  const uint64_t run = item / abi::kKvTile, heads = p.heads;
  const uint64_t tile = first_tile + run / heads, head = run % heads;
  const uint64_t slot = tile * abi::kKvTile + item % abi::kKvTile;
  const bool present = slot >= p.first_slot && slot < p.first_slot + p.tokens;
  float y[kSlots][kChunk] = {};
  if (present) {
    decode_row<kFormat>(p.cache, at,
                        {pointer<const uint8_t>(args.at[0] + head * p.cache.codes_head_stride +
                                                tile * p.cache.codes_tile_stride),
                         pointer<const uint8_t>(args.at[1] + head * p.cache.scales_head_stride +
                                                tile * p.cache.scales_tile_stride),
                         static_cast<uint32_t>(item % abi::kKvTile)},
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
