#pragma once
// Compressing tiles: 8 slots of one head of K or V. A block of 256 threads takes as many tiles as
// fit, each row by `lanes` lanes of a warp; codes meet in shared memory, because eight tokens share
// V's words and 16 coordinates K's.
#include "abi/kv_layout.h"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/mlx_native.cuh"
#include "cuda/kernels/pack.cuh"
#include "cuda/kernels/tile_address.cuh"
#include "cuda/kernels/tile_shared.cuh"

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

// Rows beyond 512 coordinates would take too many registers from the others: they lie in shared
// memory, and a lane takes its chunks one by one. A row is a warp's; a scale block is in one slot.
struct LongRow {
  float* own;  // this thread's, kBlockThreads apart

  __device__ float& at(uint32_t slot, uint32_t i) const {
    return own[(slot * kLongFloats + i) * kBlockThreads];
  }
  __device__ void get(uint32_t slot, float (&y)[1][kChunk]) const {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) y[0][i] = at(slot, i);
  }
  __device__ void put(uint32_t slot, const float (&y)[1][kChunk]) const {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) at(slot, i) = y[0][i];
  }
};
constexpr uint32_t kLongNote = kChunk;  // a slot's sum, or its block's largest magnitude

template <class Row>
__device__ void load_flipped(const RowPlace<1>& at, const Row& row, float (&y)[1][kChunk]) {
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) y[0][i] = 0.0f;
  if (row.present()) row.load(at, y);
  flip_signs(at, kNativeSigns, y);
}

// The stages between slots; transforms beyond 256 begin at the first one.
__device__ inline void transform_slots(uint32_t size, const LongRow& y) {
  if (size <= kChunk * 32) return;
#pragma unroll 1
  for (uint32_t i = 0; i < kChunk; ++i) {
    float v[kManySlots];
#pragma unroll
    for (uint32_t s = 0; s < kManySlots; ++s) v[s] = y.at(s, i);
    butterfly(v[0], v[1]);
    if (size > 2 * kChunk * 32) {
      butterfly(v[2], v[3]);
      butterfly(v[0], v[2]), butterfly(v[1], v[3]);
    }
#pragma unroll
    for (uint32_t s = 0; s < kManySlots; ++s) y.at(s, i) = v[s];
  }
}

// Largest magnitudes of transform blocks, as notes.
template <class Row>
__device__ void note_largest(uint32_t head_dim, const Row& row, const LongRow& y) {
  uint32_t joint = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < kManySlots; ++s) {
    const RowPlace<1> at(head_dim, s);
    float x[1][kChunk];
    uint32_t largest[1];
    load_flipped(at, row, x);
    find_largest(x, largest);
    reduce_blocks(at, at.size, largest, larger_of);
    if (at.size[0] > abi::kKvScaleBlock) joint = larger_of(joint, largest[0]);
    y.at(s, kLongNote) = __uint_as_float(largest[0]);
  }
  for (uint32_t s = 0; s < kManySlots; ++s) {
    if (RowPlace<1>(head_dim, s).size[0] > abi::kKvScaleBlock)
      y.at(s, kLongNote) = __uint_as_float(joint);
  }
}

// What a row needs on its way through shared memory.
struct LongWork {
  uint32_t head_dim;
  float stretch;
  LongRow y;
  TileThread me;
};

// `bring`: blocks are brought into range first. Returns whether one is out of it. Not a template
// parameter: rows this long are rare, and each copy of this takes the compiler a second.
template <uint32_t kFormat, class Row>
__device__ bool encode_long_row(const LongWork& work, const Row& row, bool bring,
                                TileShared& shared) {
#pragma unroll 1
  for (uint32_t s = 0; s < kManySlots; ++s) {
    const RowPlace<1> at(work.head_dim, s);
    float x[1][kChunk];
    load_flipped(at, row, x);
    if (bring) lose_exponent(lost_exponent(__float_as_uint(work.y.at(s, kLongNote))), x[0]);
    transform_lanes(at, x);
    work.y.put(s, x);
  }
  transform_slots(RowPlace<1>(work.head_dim).size[0], work.y);
  float joint = 0;
  bool extreme = false;
#pragma unroll 1
  for (uint32_t s = 0; s < kManySlots; ++s) {
    const RowPlace<1> at(work.head_dim, s);
    const uint32_t largest[1] = {__float_as_uint(work.y.at(s, kLongNote))};
    float x[1][kChunk], sum[1];
    work.y.get(s, x);
    stage_inside<1>(x[0]), stage_inside<2>(x[0]);
    sum_squares(at, x, sum);
    const ScaleFactors<1> factors{work.stretch,
                                  {bring ? power_of_two(lost_exponent(largest[0])) : 1.0f}};
    EncodedRow<1> encoded;
    code_row<kFormat>(at, x, factors, sum, encoded);
    if (bring) replace_degenerate<kFormat>(largest, encoded);
    put_row(at, work.me, kManySlots, encoded, shared);
    const uint32_t parts = at.size[0] / abi::kKvScaleBlock;  // a slot each, from the first on
    joint = parts <= 1 ? sum[0] : joint + sum[0];
    extreme = extreme || (at.active(0) && (parts <= 1 || s + 1 == parts) && !in_range(joint));
  }
  return extreme;
}

// A function of its own: inlined, it would make the compiler's work on the short rows longer, too.
template <uint32_t kFormat, class Row>
__device__ __noinline__ void encode_long(LongWork work, Row row, TileShared& shared) {
  bool bring = false;
#pragma unroll 1
  for (;;) {
    const bool extreme = encode_long_row<kFormat>(work, row, bring, shared);
    if (bring || __ballot_sync(kAllLanes, row.present() && extreme ? 1 : 0) == 0) return;
    note_largest(work.head_dim, row, work.y);
    bring = true;
  }
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
