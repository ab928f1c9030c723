#pragma once
// Rows beyond 512 coordinates would take too many registers from the others: they lie in shared
// memory, and a lane takes its chunks one by one. A row is a warp's; a scale block is in one slot.
#include "cuda/kernels/tile_shared.cuh"

namespace gyre::cuda {

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

}  // namespace gyre::cuda
