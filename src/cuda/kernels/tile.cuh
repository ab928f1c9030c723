#pragma once
// Compressing tiles: 8 slots of one head of K or V. A block of 256 threads takes as many tiles as
// fit, each row by `lanes` lanes of a warp; codes meet in shared memory, because eight tokens share
// V's words and 16 coordinates K's.
#include "abi/kv_quantize.h"
#include "cuda/kernels/compat.cuh"
#include "cuda/kernels/encode.cuh"
#include "cuda/kernels/pack.cuh"

namespace gyre::cuda {

constexpr uint32_t kRoleV = 1;  // KvRole::v

struct alignas(16) TileShared {
  uint8_t codes[kBlockThreads * kManySlots * kChunk];
  uint16_t scales[kBlockThreads / 32][abi::kKvMaxScales][abi::kKvTile];
  uint8_t present[kBlockThreads / 32][abi::kKvTile];
};

// Where a thread is in its block.
struct TileThread {
  uint32_t tile;    // of the block
  uint32_t thread;  // of the tile
  uint32_t slot;    // of the tile: the thread's row

  __device__ explicit TileThread(uint32_t lanes)
      : tile(threadIdx.x / (abi::kKvTile * lanes)),
        thread(threadIdx.x & (abi::kKvTile * lanes - 1)),
        slot(thread / lanes) {}
};

// A row of the source, or none.
template <class Source>
struct PlainRow {
  const Source* row;  // null: none

  __device__ bool present() const { return row != nullptr; }
  template <uint32_t kSlots>
  __device__ void load(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) const {
    load_row(at, row, y);
  }
};

struct TilePlace {
  uint8_t* codes;
  uint8_t* scales;
};

template <uint32_t kFormat, uint32_t kSlots, class Row>
__device__ void encode_row(const RowPlace<kSlots>& at, const Row& row, float stretch,
                           EncodedRow<kSlots>& out) {
  float y[kSlots][kChunk] = {}, sum[kSlots];
  ScaleFactors<kSlots> factors;
  factors.stretch = stretch;
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) factors.power[s] = 1.0f;
  if (row.present()) row.load(at, y);
  flip_signs(at, kNativeSigns, y);
  transform<false>(at, y);
  code_row<kFormat>(at, y, factors, sum, out);
  const uint32_t first = threadIdx.x & 31 & ~(at.lanes - 1);
  const uint32_t row_mask = (at.lanes == 32 ? kAllLanes : (1u << at.lanes) - 1) << first;
  const uint32_t extreme = __ballot_sync(kAllLanes, row.present() && is_extreme(at, sum) ? 1 : 0);
  if (extreme == 0) return;
  if (row.present()) row.load(at, y);
  flip_signs(at, kNativeSigns, y);
  EncodedRow<kSlots> again;
  code_extreme_row<kFormat>(at, stretch, y, again);
  if ((extreme & row_mask) != 0) out = again;
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
template <uint32_t kFormat, uint32_t kSlots, class Row>
__device__ void quantize_native(TileShared& shared, const abi::KvCacheLayout& cache,
                                const TilePlace& place, const Row& row) {
  const RowPlace<kSlots> at(cache.head_dim);
  const TileThread me(at.lanes);
  const uint32_t stride = at.lanes * kSlots * kChunk;
  uint8_t* const tile_codes = shared.codes + me.tile * abi::kKvTile * stride;
  uint8_t* const row_codes = tile_codes + me.slot * stride;
  EncodedRow<kSlots> encoded;
  encode_row<kFormat>(at, row, cache.role == kRoleV ? abi::kv_value_stretch(kFormat) : 1.0f,
                      encoded);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const uint32_t begin = at.begin(s);
    *reinterpret_cast<uint2*>(row_codes + begin) =
        make_uint2(encoded.codes[s][0], encoded.codes[s][1]);
    const uint32_t scale_size = least_of(at.size[s], abi::kKvScaleBlock);
    if (at.active(s) && (begin & (scale_size - 1)) == 0)
      shared.scales[me.tile][scale_index(at.head_dim, at.size[s], begin)][me.slot] =
          static_cast<uint16_t>(encoded.scale[s]);
  }
  if (at.lane == 0) shared.present[me.tile][me.slot] = row.present() ? 1 : 0;
  __syncthreads();
  uint32_t written = 0;
#pragma unroll
  for (uint32_t t = 0; t < abi::kKvTile; ++t)
    written |= static_cast<uint32_t>(shared.present[me.tile][t]) << t;
  if (written == 0) return;
  store_scales(shared, me, cache, written, place.scales);
  if (cache.role == kRoleV) {
    pack_tile<kFormat>(tile_codes, stride, cache.head_dim, written, me.thread,
                       abi::kKvTile * at.lanes, place.codes);
  } else if (row.present()) {
    pack_row<kFormat>(row_codes, cache.head_dim, at.lane, at.lanes,
                      place.codes + me.slot * (cache.codes_tile_stride / abi::kKvTile));
  }
}

template <uint32_t kFormat, class Row>
__device__ void quantize_tile(TileShared& shared, const abi::KvCacheLayout& cache,
                              const TilePlace& place, const Row& row) {
  if constexpr (abi::kv_is_compat(kFormat)) {
    const RowPlace<kCompatSlots> at(cache.head_dim);
    const TileThread me(at.lanes);
    float x[kCompatSlots][kChunk] = {};
    if (row.present()) row.load(at, x);
    compat_encode(kFormat, at, x, place.codes + me.slot * (cache.codes_tile_stride / abi::kKvTile),
                  reinterpret_cast<float*>(place.scales +
                                           me.slot * (cache.scales_tile_stride / abi::kKvTile)),
                  row.present());
  } else if (takes_many_slots(cache.head_dim)) {
    quantize_native<kFormat, kManySlots>(shared, cache, place, row);
  } else {
    quantize_native<kFormat, kFewSlots>(shared, cache, place, row);
  }
}

}  // namespace gyre::cuda
