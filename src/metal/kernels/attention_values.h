#pragma once
// Sums of values: a simdgroup takes a tile of V, each lane its own coordinates, with the weights of
// the tile's eight keys from the group's memory.
#include "metal/kernels/attention_formats.h"

namespace gyre {
namespace metal {

constant constexpr uint kMaxSums = kMaxTileFloats / kLanes + kMaxTileRows;  // of a lane

struct LaneSums {
  float at[kMaxSums];  // [coordinate of the lane][row]
};

// The weights of one key; guarded: some are 0 because the row does not see the key, whose value may
// be anything.
inline void add_value(thread float* sums, const threadgroup float* weights, float value, uint rows,
                      bool guarded) {
  GYRE_UNROLL
  for (uint r = 0; r < rows; ++r) {
    if (!guarded || weights[r] != 0) sums[r] = fma(weights[r], value, sums[r]);
  }
}

// Eight codes of a coordinate, as they lie in a plane of the tile.
inline uint2 value_codes(const device uchar* plane, uint c, uint bits, bool wide) {
  const device uchar* const from = plane + c * bits;
  if (wide && bits == 8) return read_cache<uint2>(from);
  if (wide && bits == 4) return {read_cache<uint>(from), 0};
  if (wide && bits == 2) return {read_cache<ushort>(from), 0};
  uint2 words = {0, 0};
  for (uint i = 0; i < bits; ++i) {
    const uint byte = read_cache<uchar>(from + i);
    if (i < 4) words.x |= byte << (8 * i);
    if (i >= 4) words.y |= byte << (8 * (i - 4));
  }
  return words;
}
inline uint value_code(uint2 codes, uint bits, uint token) {
  if (bits == 8) return (token < 4 ? codes.x : codes.y) >> (token % 4 * 8) & 0xFF;
  return codes.x >> (token % bits * 8 + token / bits * bits) & ((1u << bits) - 1);
}

// scales: of the tile's keys, [key][block]. A lane's coordinates lie side by side.
inline void add_levels(const thread StoredSide& v, const device uchar* tile,
                       const threadgroup float* weights, const threadgroup float* scales,
                       uint blocks, uint rows, uint lane, bool guarded, thread LaneSums& sums) {
  const uint low_bits = abi::kv_low_bits(v.format), high_bits = abi::kv_high_bits(v.format);
  const device uchar* const high = tile + v.dim * low_bits;
  const uint each = (v.dim + kLanes - 1) / kLanes;
  GYRE_UNROLL
  for (uint i = 0; i < each; ++i) {
    const uint c = lane * each + i;
    if (c >= v.dim) continue;
    const uint block = blocks == 1 ? 0 : scale_block_of(v.dim, c);
    const uint2 low_codes = value_codes(tile, c, low_bits, v.wide);
    uint2 high_codes = {0, 0};
    if (high_bits != 0) high_codes = value_codes(high, c, high_bits, v.wide);
    for (uint t = 0; t < abi::kKvTile; ++t) {
      uint code = value_code(low_codes, low_bits, t);
      if (high_bits != 0) code |= value_code(high_codes, high_bits, t) << low_bits;
      const float value = level_of(v.format, code) * kLevelUnit * scales[t * blocks + block];
      add_value(sums.at + i * rows, weights + t * rows, value, rows, guarded);
    }
  }
}

// Rows of 16 or 32-bit values, or of mlx-native's codes, with the norms of the tile's keys in
// `norms`.
inline void add_rows(const thread StoredSide& v, const device uchar* tile,
                     const threadgroup float* weights, const threadgroup float* norms, uint blocks,
                     uint rows, uint lane, bool guarded, thread LaneSums& sums) {
  const uint each = (v.dim + kLanes - 1) / kLanes;
  for (uint t = 0; t < abi::kKvTile; ++t) {
    bool used = !guarded;
    for (uint r = 0; r < rows; ++r) used = used || weights[t * rows + r] != 0;
    if (!used) continue;
    const device uchar* const row = tile + t * (v.tile_stride / abi::kKvTile);
    uint byte = 0;
    GYRE_UNROLL
    for (uint i = 0; i < each; ++i) {
      const uint c = lane * each + i;
      if (c >= v.dim) continue;
      float value = 0;
      if (abi::kv_is_mlx_native(v.format)) {
        const bool nibbles = v.format == abi::kMlxNative4;
        if (!nibbles || i == 0 || c % 2 == 0) byte = read_cache<uchar>(row + (nibbles ? c / 2 : c));
        value = mlx_native_level(v.format, nibbles ? byte >> (c % 2 * 4) & 15 : byte) *
                norms[t * blocks + (blocks == 1 ? 0 : c / 256)];
      } else {
        value = dense_value(row, v.format, c);
      }
      add_value(sums.at + i * rows, weights + t * rows, value, rows, guarded);
    }
  }
}

}  // namespace metal
}  // namespace gyre
