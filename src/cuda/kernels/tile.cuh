#pragma once
// Compressing tiles: 8 slots of one head of K or V. A block of 256 threads takes as many tiles as
// fit, each row by `lanes` lanes of a warp; codes meet in shared memory, because eight tokens share
// V's words and 16 coordinates K's.
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "cuda/kernels/block_shared.cuh"
#include "cuda/kernels/long_row.cuh"
#include "cuda/kernels/mlx_native.cuh"
#include "cuda/kernels/pack.cuh"

namespace gyre::cuda {

// Rows out of range, once more. A function of its own: what it needs takes no registers from
// others.
template <uint32_t kFormat, uint32_t kSlots, class Row>
__device__ __noinline__ void encode_extreme(uint32_t head_dim, Row row, float stretch, bool extreme,
                                            TileShared& shared) {
  const RowPlace<kSlots> at(head_dim);
  float y[kSlots][kChunk] = {};
  if (row.present()) row.load(at, y);
  flip_signs(at, kNativeSigns, y);
  EncodedRow<kSlots> encoded;
  code_extreme_row<kFormat>(at, stretch, y, encoded);
  if (extreme) put_row(at, TileThread(at.lanes), kSlots, encoded, shared);
}

template <uint32_t kFormat, uint32_t kSlots, class Row>
__device__ void encode_row(const RowPlace<kSlots>& at, const TileThread& me, const Row& row,
                           float stretch, TileShared& shared) {
  float y[kSlots][kChunk] = {}, sum[kSlots];
  ScaleFactors<kSlots> factors;
  factors.stretch = stretch;
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) factors.power[s] = 1.0f;
  if (row.present()) row.load(at, y);
  flip_signs(at, kNativeSigns, y);
  transform<false>(at, y);
  EncodedRow<kSlots> encoded;
  sum_squares(at, y, sum);
  code_row<kFormat>(at, y, factors, sum, encoded);
  put_row(at, me, kSlots, encoded, shared);
  const uint32_t first = threadIdx.x & 31 & ~(at.lanes - 1);
  const uint32_t row_mask = (at.lanes == 32 ? kAllLanes : (1u << at.lanes) - 1) << first;
  const bool is_out = row.present() && at.active(0) && is_extreme(at, sum);
  const uint32_t extreme = __ballot_sync(kAllLanes, is_out ? 1 : 0);
  if (extreme != 0)
    encode_extreme<kFormat, kSlots>(at.head_dim, row, stretch, (extreme & row_mask) != 0, shared);
}

// What kv_feedback made of the row, to shared memory.
__device__ inline void put_calibrated_row(uint32_t head_dim, const TileThread& me, uint32_t stride,
                                          const PlainRow<CalibratedRow>& row, TileShared& shared) {
  const uint32_t lanes = tile_lanes(head_dim), lane = threadIdx.x & (lanes - 1);
  constexpr uint32_t kLaneCoordinates = kFewSlots * kChunk;
  if (!row.present() || lane * kLaneCoordinates >= head_dim) return;
  uint8_t* const codes = shared.codes + (me.tile * abi::kKvTile + me.slot) * stride;
  row.copy_codes(head_dim, lane * kLaneCoordinates, kLaneCoordinates, codes);
  if (lane < head_dim / abi::kv_calibrated_block(head_dim))
    shared.scales[me.tile][lane][me.slot] = static_cast<uint16_t>(row.scale(head_dim, lane));
}

// The tile's scales from shared memory: whole groups of eight where all are new.
__device__ inline void store_scales(const TileShared& shared, const TileThread& me,
                                    const abi::KvCacheLayout& cache, uint32_t written,
                                    uint8_t* scales) {
  const uint32_t count = static_cast<uint32_t>(cache.scales_tile_stride / (2 * abi::kKvTile));
  const uint32_t threads = abi::kKvTile * tile_lanes(cache.head_dim);
  if (written == 0xFFu && is_aligned(scales, 16)) {
    for (uint32_t i = me.thread; i < count; i += threads)
      *reinterpret_cast<uint4*>(scales + 16 * i) =
          *reinterpret_cast<const uint4*>(shared.scales[me.tile][i]);
    return;
  }
  for (uint32_t i = me.thread; i < count * abi::kKvTile; i += threads) {
    const uint32_t slot = i % abi::kKvTile, value = shared.scales[me.tile][i / abi::kKvTile][slot];
    if ((written >> slot & 1) == 0) continue;
    scales[2 * i] = static_cast<uint8_t>(value);
    scales[2 * i + 1] = static_cast<uint8_t>(value >> 8);
  }
}

// Rows to codes in shared memory, then to the cache. All threads of the block come here.
template <uint32_t kFormat, class Row>
__device__ void quantize_native(TileShared& shared, const abi::KvCacheLayout& cache,
                                const TileAddress& address, const Row& row) {
  const bool is_long = takes_many_slots(cache.head_dim);
  const uint32_t lanes = tile_lanes(cache.head_dim), lane = threadIdx.x & (lanes - 1);
  const TileThread me(lanes);
  const uint32_t stride = lanes * (is_long ? kManySlots : kFewSlots) * kChunk;
  uint8_t* const tile_codes = shared.codes + me.tile * abi::kKvTile * stride;
  const float stretch = cache.role == kRoleV ? abi::kv_codec(kFormat).value_stretch : 1.0f;
  if constexpr (is_calibrated_row<Row>) {
    put_calibrated_row(cache.head_dim, me, stride, row, shared);
  } else if (is_long) {
    encode_long<kFormat>({cache.head_dim, stretch, {dynamic_floats() + threadIdx.x}, me}, row,
                         shared);
  } else {
    encode_row<kFormat>(RowPlace<kFewSlots>(cache.head_dim), me, row, stretch, shared);
  }
  if (lane == 0) shared.present[me.tile][me.slot] = row.present() ? 1 : 0;
  __syncthreads();
  uint32_t written = 0;
#pragma unroll
  for (uint32_t t = 0; t < abi::kKvTile; ++t)
    written |= static_cast<uint32_t>(shared.present[me.tile][t]) << t;
  if (written == 0) return;
  store_scales(shared, me, cache, written, address.scales);
  if (cache.role == kRoleV) {
    pack_tile<kFormat>(tile_codes, stride, cache.head_dim, written, me.thread, abi::kKvTile * lanes,
                       address.codes);
  } else if (row.present()) {
    pack_row<kFormat>(tile_codes + me.slot * stride, cache.head_dim, lane, lanes,
                      address.codes + me.slot * (cache.codes_tile_stride / abi::kKvTile));
  }
}

template <uint32_t kFormat, class Row>
__device__ void quantize_tile(TileShared& shared, const abi::KvCacheLayout& cache,
                              const TileAddress& address, const Row& row) {
  if constexpr (abi::kv_is_mlx_native(kFormat)) {
    const TileThread me(tile_lanes(cache.head_dim));
    mlx_native_store<kFormat>(
        cache, row, address.codes + me.slot * (cache.codes_tile_stride / abi::kKvTile),
        reinterpret_cast<float*>(address.scales +
                                 me.slot * (cache.scales_tile_stride / abi::kKvTile)));
  } else {
    quantize_native<kFormat>(shared, cache, address, row);
  }
}

}  // namespace gyre::cuda
