#pragma once
// Keys and values of a stage of attention_many_rows, decoded to floats in the group's memory, [key]
// [coordinate]. Positions without a key become zeros.
#include "metal/kernels/attention_values.h"

namespace gyre {
namespace metal {

struct Stage {
  RowTile tile;
  StoredSide k, v;
  ulong first;  // position of its first key
  uint keys;
  uint v_blocks;
  bool paged;
};

// Keys side by side in the threads, each thread a part of the coordinates.
inline void decode_keys(const thread Stage& s, constant abi::AttentionParams& p,
                        const thread Grid& grid, threadgroup float* to, thread bool& invalid) {
  const uint i = grid.index % s.keys, parts = grid.threads / s.keys, part = grid.index / s.keys;
  const uint each = (s.k.dim / parts + 15) / 16 * 16;
  const uint begin = part * each, end = begin + each < s.k.dim ? begin + each : s.k.dim;
  const ulong position = s.first + i;
  threadgroup float* const row_to = to + i * s.k.dim;
  if (!s.tile.holds_key(position)) {
    for (uint c = begin; c < end; ++c) row_to[c] = 0;
    return;
  }
  const TileAt at = tile_at(s.tile, p.table, s.paged, position / abi::kKvTile, invalid);
  const uint slot = static_cast<uint>(position % abi::kKvTile);
  const device uchar* const row =
      s.k.codes + at.offset + at.tile * s.k.tile_stride + slot * (s.k.tile_stride / abi::kKvTile);
  const device uchar* const scales = s.k.scales + at.offset + at.tile * s.k.scales_tile_stride;
  if (abi::kv_is_native(s.k.format)) {
    CodeReader reader = code_reader(s.k, row);
    for (uint c = begin; c < end; c += 16) {
      const uint4 codes = reader.next(c);
      const uint block = scale_block_of(s.k.dim, c);  // ends at multiples of 16, or with the row
      const float scale = raw_scale(scales, block, slot, s.k.wide_scales);
      for (uint e = 0; e < 16 && c + e < end; ++e) {
        row_to[c + e] = level_of(s.k.format, byte_of(codes, e)) * kLevelUnit * scale * kScaleUnit;
      }
    }
  } else {
    for (uint c = begin; c < end; ++c) row_to[c] = dense_value(row, s.k.format, c);
  }
}

// Tiles of eight keys; lanes run along the coordinates. Returns whether a value is not finite.
inline bool decode_values(const thread Stage& s, constant abi::AttentionParams& p,
                          const thread Grid& grid, threadgroup float* to, thread bool& invalid) {
  bool non_finite = false;
  for (uint t = grid.simdgroup; t < s.keys / abi::kKvTile; t += kAttentionSimdgroups) {
    const ulong index = s.first / abi::kKvTile + t;
    const bool has = s.tile.has_keys(index);
    TileAt at = {0, 0};
    if (has) at = tile_at(s.tile, p.table, s.paged, index, invalid);
    const device uchar* const codes = s.v.codes + at.offset + at.tile * s.v.tile_stride;
    const device uchar* const scales = s.v.scales + at.offset + at.tile * s.v.scales_tile_stride;
    const uint low_bits = abi::kv_low_bits(s.v.format), high_bits = abi::kv_high_bits(s.v.format);
    for (uint c = grid.lane; c < s.v.dim; c += kLanes) {
      uint2 low = {0, 0}, high = {0, 0};
      uint block = 0;
      const bool native = abi::kv_is_native(s.v.format);
      if (has && native) {
        block = s.v_blocks == 1 ? 0 : scale_block_of(s.v.dim, c);
        low = value_codes(codes, c, low_bits, s.v.wide);
        if (high_bits != 0) high = value_codes(codes + s.v.dim * low_bits, c, high_bits, s.v.wide);
      }
      for (uint slot = 0; slot < abi::kKvTile; ++slot) {
        float value = 0;
        if (s.tile.holds_key(index * abi::kKvTile + slot)) {
          if (native) {
            uint code = value_code(low, low_bits, slot);
            if (high_bits != 0) code |= value_code(high, high_bits, slot) << low_bits;
            value = level_of(s.v.format, code) * kLevelUnit *
                    raw_scale(scales, block, slot, s.v.wide_scales);
          } else {
            value = dense_value(codes + slot * (s.v.tile_stride / abi::kKvTile), s.v.format, c);
          }
        }
        non_finite = non_finite || !isfinite(value);
        to[(t * abi::kKvTile + slot) * s.v.dim + c] = value;
      }
    }
  }
  return non_finite;
}

}  // namespace metal
}  // namespace gyre
