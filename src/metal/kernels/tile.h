#pragma once
// Storing a tile: 8 slots of one head of K or V, by a simdgroup. Tokens are calibrated one by one;
// their codes meet in the group's memory, because eight tokens share V's bytes. All writers store
// through this.
#include "abi/kv_feedback.h"
#include "abi/write.h"
#include "metal/kernels/mlx_native_codes.h"
#include "metal/kernels/planes.h"

namespace gyre {
namespace metal {

// Where a tile goes.
struct TileTarget {
  device uchar* codes;
  device uchar* scales;
  bool wide;  // codes of a tile begin at multiples of 4
};
inline bool is_wide_cache(constant abi::KvCacheLayout& cache, bool aligned) {
  return aligned && ((cache.codes_head_stride | cache.codes_tile_stride) & 3) == 0;
}

// Bit `slot` where lane `slot` says so; lanes from 8 on repeat the first eight.
inline uint slot_mask(bool present, uint lane) {
  uint mask = present ? 1u << lane % abi::kKvTile : 0;
  for (uint step = 1; step < abi::kKvTile; step *= 2)
    mask |= simd_shuffle_xor(mask, static_cast<ushort>(step));
  return mask;
}

inline bool is_dense(uint format) {
  return !abi::kv_is_native(format) && !abi::kv_is_mlx_native(format);
}

// Rows of a tensor, in f32, f16 or bf16. A lane knows where the row of slot lane % 8 begins.
struct TensorRows {
  const device uchar* base;
  uint dtype;
  ulong offset;
  TensorRow row;

  void begin(uint slot) { row = {base + shuffle_ulong(offset, slot), dtype}; }
  float get(uint coordinate) const { return row.get(coordinate); }
  void copy(uint coordinate, device uchar* to, uint to_dtype) const {
    copy_float(row, coordinate, to, to_dtype);
  }
};

// Calibrated rows (abi/kv_feedback.h).
struct CalibratedRows {
  const device uchar* base;
  ulong offset;
  const device uchar* row;

  void begin(uint slot) { row = base + shuffle_ulong(offset, slot); }
  // A calibrated row begins with the row in f16.
  void copy(uint coordinate, device uchar* to, uint /*to_dtype*/) const {
    pointer<ushort>(to)[coordinate] = pointer<ushort>(row)[coordinate];
  }
};

template <class Rows>
void copy_row(const thread Rows& rows, uint head_dim, device uchar* to, uint dtype, uint lane) {
  for (uint i = lane; i < head_dim; i += kLanes) rows.copy(i, to, dtype);
}

// Codes of a slot to the group's memory, scales to memory.
inline void put_row(constant abi::KvCacheLayout& cache, uint format, const thread RowCodes& row,
                    uint slot, threadgroup uchar* codes, device uchar* scales, uint lane) {
  threadgroup uint* const words =
      reinterpret_cast<threadgroup uint*>(codes + slot * cache.head_dim);
  const ulong norm_bytes = cache.scales_tile_stride / abi::kKvTile;
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint first = lane_coordinate(j, lane);
    if (first >= cache.head_dim) continue;
    words[first / 4] = row.codes[j];
    if (abi::kv_is_native(format)) {
      const uint number = scale_number(first, cache.head_dim);
      if (number == kNoScale) continue;
      device uchar* const to = scales + 2 * (number * abi::kKvTile + slot);
      to[0] = static_cast<uchar>(row.scale[j]);
      to[1] = static_cast<uchar>(row.scale[j] >> 8);
    } else if (first == 0 || (cache.head_dim == 512 && first == 256)) {
      *pointer<uint>(scales + slot * norm_bytes + first / 64) = row.scale[j];
    }
  }
}

// What lies in the group's memory, to the cache.
inline void store_codes(constant abi::KvCacheLayout& cache, uint format, uint tokens,
                        const threadgroup uchar* codes, const thread TileTarget& to, uint lane) {
  const ulong row_bytes = cache.codes_tile_stride / abi::kKvTile;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (abi::kv_is_native(format) && cache.role == kRoleV) {
    pack_tile(codes, tokens, format, cache.head_dim, to.codes, to.wide, lane);
  } else {
    for (uint slot = 0; slot < abi::kKvTile; ++slot) {
      if ((tokens >> slot & 1u) == 0) continue;
      const threadgroup uchar* const from = codes + slot * cache.head_dim;
      if (abi::kv_is_native(format)) {
        pack_row(from, format, cache.head_dim, to.codes + slot * row_bytes,
                 to.wide && row_bytes % 4 == 0, lane);
      } else {
        pack_mlx_native_row(from, format, cache.head_dim, to.codes + slot * row_bytes, lane);
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Where a step's rows go in 16 bits, too: lane % 8 is the slot. kNoF16Row: nowhere.
struct F16Rows {
  device uchar* base;
  ulong offset;

  template <class Rows>
  void store(const thread Rows& rows, uint slot, uint head_dim, uint lane) const {
    const ulong at = shuffle_ulong(offset, slot);
    if (at != abi::kNoF16Row) copy_row(rows, head_dim, base + at, kF16, lane);
  }
};

// What a simdgroup does with a tile. A lane knows the token of slot lane % 8.
struct TileJob {
  uint tokens;  // bits of the slots that get one
  ulong token;
  TileTarget to;
  F16Rows f16;
  bool is_body;  // else its rows have no place but `f16`
};

// The row of a slot: codes to the group's memory, scales and dense rows to memory.
template <class Rows>
void put_slot(constant abi::KvCacheLayout& cache, uint format, const thread Rows& rows, uint slot,
              const thread TileTarget& to, threadgroup uchar* codes, uint lane) {
  if (is_dense(format)) {
    const ulong row_bytes = cache.codes_tile_stride / abi::kKvTile;
    copy_row(rows, cache.head_dim, to.codes + slot * row_bytes, format, lane);
    return;
  }
  RowCodes row;
  if (abi::kv_is_native(format)) {
    const float stretch = cache.role == kRoleV ? abi::kv_codec(format).value_stretch : 1.0f;
    encode_row(rows, format, stretch, cache.head_dim, lane, row);
  } else {
    encode_mlx_native_row(rows, format, cache, lane, row);
  }
  put_row(cache, format, row, slot, codes, to.scales, lane);
}
// Codes and scales of calibrated rows are made already.
inline void put_slot(constant abi::KvCacheLayout& cache, uint /*format*/,
                     const thread CalibratedRows& rows, uint slot, const thread TileTarget& to,
                     threadgroup uchar* codes, uint lane) {
  const uint head_dim = cache.head_dim;
  for (uint i = lane; i < head_dim; i += kLanes)
    codes[slot * head_dim + i] = rows.row[abi::kv_calibrated_codes(head_dim) + i];
  const uint scales = head_dim / abi::kv_calibrated_block(head_dim);
  if (lane < 2 * scales)
    to.scales[2 * (lane / 2 * abi::kKvTile + slot) + lane % 2] =
        rows.row[abi::kv_calibrated_scale(head_dim) + lane];
}

// Every lane of the simdgroup comes here.
template <class Rows>
void store_tile(constant abi::KvCacheLayout& cache, uint format, const thread TileJob& job,
                thread Rows& rows, threadgroup uchar* codes, uint lane) {
  for (uint slot = 0; slot < abi::kKvTile; ++slot) {
    if ((job.tokens >> slot & 1u) == 0) continue;
    rows.begin(slot);
    job.f16.store(rows, slot, cache.head_dim, lane);
    if (job.is_body) put_slot(cache, format, rows, slot, job.to, codes, lane);
  }
  if (job.is_body && !is_dense(format)) store_codes(cache, format, job.tokens, codes, job.to, lane);
}

// A stream's rows as the caller has them: a tensor, or calibrated rows.
struct TileSource {
  const device uchar* rows;
  uint dtype;
  bool calibrated;
  ulong token_stride, head_offset;
};
inline void store_source(constant abi::KvCacheLayout& cache, uint format, const thread TileJob& job,
                         const thread TileSource& from, threadgroup uchar* codes, uint lane) {
  const ulong offset = job.token * from.token_stride + from.head_offset;
  if (from.calibrated) {
    CalibratedRows rows = {from.rows, offset, from.rows};
    store_tile(cache, format, job, rows, codes, lane);
  } else {
    TensorRows rows = {from.rows, from.dtype, offset, {from.rows, from.dtype}};
    store_tile(cache, format, job, rows, codes, lane);
  }
}

}  // namespace metal
}  // namespace gyre
