#pragma once
// Decode attention: where the bytes of the keys that a warp takes at a time lie in shared memory,
// and how many warps and stages a block has. Host and kernel find the same.
#include "attention_plan.cuh"

namespace gyre::cuda {

// Bits of one code in a format's first and second plane; 16-bit values are one plane.
constexpr uint32_t decode_plane_bits(uint32_t format, uint32_t plane) {
  if (is_half_format(format)) return plane == 0 ? 16 : 0;
  return plane == 0 ? abi::kv_low_bits(format) : abi::kv_high_bits(format);
}

// What is read at once lies in different banks: two neighbouring keys of each of four tiles, or
// eight coordinates of each of four tiles.
struct DecodePlane {
  uint32_t bytes;       // of a row (K, 16-bit V) or a tile (V in levels)
  uint32_t from;        // where it begins in the stored row or tile
  uint32_t tile_pitch;  // bytes from tile to tile
  uint32_t at;          // in the stage
};

struct DecodeShape {
  bool fits;             // formats and head dim can be worked on so
  uint32_t keys, tiles;  // that a warp takes at a time
  uint32_t blocks;       // scales of a key
  DecodePlane k[2], v[2];
  uint32_t k_scales, v_scales, bytes;
};

constexpr DecodeShape decode_shape(uint32_t k, uint32_t v, uint32_t n) {
  const bool k_levels = abi::kv_is_native(k), v_levels = abi::kv_is_native(v);
  DecodeShape a = {};
  a.keys = v_levels ? 32 : 16;  // levels of V: a tile to each of four lanes
  a.tiles = a.keys / abi::kKvTile;
  a.blocks = n <= abi::kKvScaleBlock ? 1 : n / abi::kKvScaleBlock;
  a.fits = is_staged(k) && is_staged(v) && (n == 64 || n == 128 || n == 256 || n == 512);
  uint32_t at = 0, from = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bytes = n * decode_plane_bits(k, i) / 8;
    const uint32_t pad = bytes == 32 ? 64 : (bytes == 16 ? 32 : 0);
    a.k[i] = {bytes, from, 8 * bytes + pad, at};
    a.fits = a.fits && bytes % 16 == 0;  // else rows do not begin where 16 bytes can be copied
    from += bytes;
    at = round_up(at + a.tiles * a.k[i].tile_pitch, 128);
  }
  from = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bits = decode_plane_bits(v, i), bytes = v_levels ? n * bits : n * bits / 8;
    const uint32_t pitch = v_levels ? round_up(bytes + 96, 128) - 96 : 8 * bytes;
    a.v[i] = {bytes, from, bits == 0 ? 0 : pitch, at};
    from += bytes;
    at = round_up(at + a.tiles * a.v[i].tile_pitch, 128);
  }
  a.k_scales = at;
  if (k_levels) at += a.tiles * a.blocks * 16;
  a.v_scales = at;
  if (v_levels) at += a.tiles * a.blocks * 16;
  a.bytes = round_up(at, 128);
  return a;
}

constexpr uint32_t kDecodeMostWarps = 16, kDecodeMostStages = 4, kDecodeMostRows = 16;

// Shared memory of a block: states, queries as fragments, rows of floats, and a ring of stages for
// each warp. The warps' sums, [warp][row][n + 4] floats, lie where the keys were.
struct DecodeRooms {
  uint32_t queries, wide, ring;  // where they begin
  uint32_t stage, sums;          // bytes of a stage, and of one warp's sums
};

constexpr uint32_t kDecodeStateBytes = 4096;
constexpr uint32_t decode_sums_pitch(uint32_t n) { return n + 4; }

constexpr DecodeRooms decode_rooms(uint32_t k, uint32_t v, uint32_t n, uint32_t rows) {
  DecodeRooms a = {};
  a.queries = kDecodeStateBytes;
  a.wide = a.queries + n / (abi::kv_is_native(k) ? 32 : 16) * (rows / 8) * 512;
  a.ring = a.wide + rows * n * 4;
  a.stage = decode_shape(k, v, n).bytes;
  a.sums = rows * decode_sums_pitch(n) * 4;
  return a;
}

// Registers for sums decide how many warps a block may have, and what shared memory any GPU has.
constexpr uint32_t decode_most_warps(uint32_t k, uint32_t v, uint32_t n, uint32_t rows) {
  constexpr uint32_t kMostBytes = 227 << 10;
  const uint32_t sums = n / 4 * (rows / 8);
  // Codes of 3 and 4 bits take the most instructions and the fewest registers.
  const bool busy = k >= abi::kTq3 && k <= abi::kTq4 && v >= abi::kTq3 && v <= abi::kTq4;
  const uint32_t by_sums =
      sums <= 32 && rows == 8 && busy ? kDecodeMostWarps : (sums <= 64 && rows == 8 ? 12 : 8);
  const DecodeRooms rooms = decode_rooms(k, v, n, rows);
  const uint32_t by_keys = (kMostBytes - rooms.ring) / (2 * rooms.stage);
  const uint32_t warps = by_keys < by_sums ? by_keys : by_sums;
  return warps <= 4 ? 4 : warps / 4 * 4;
}

// The kernel knows its warps and its bytes.
constexpr uint32_t decode_stages(const DecodeRooms& rooms, uint32_t warps, uint32_t bytes) {
  const uint32_t stages = (bytes - rooms.ring) / (warps * rooms.stage);
  return stages < kDecodeMostStages ? stages : kDecodeMostStages;
}

struct DecodePlan {
  uint32_t warps, bytes;  // 0: there is not enough shared memory
};

// Three stages if that leaves four warps, else two.
constexpr DecodePlan decode_plan(uint32_t k, uint32_t v, uint32_t n, uint32_t rows, uint32_t most) {
  const DecodeRooms rooms = decode_rooms(k, v, n, rows);
  const uint32_t limit = decode_most_warps(k, v, n, rows);
  if (rooms.ring >= most) return {};
  for (uint32_t stages = 3; stages >= 2; --stages) {
    const uint32_t keys = stages * rooms.stage, each = keys > rooms.sums ? keys : rooms.sums;
    uint32_t warps = (most - rooms.ring) / each;
    if (warps > limit) warps = limit;
    if (warps > 4) warps = warps / 4 * 4;
    if (warps == 0 || (warps < 4 && stages > 2)) continue;
    const uint32_t in_all = decode_stages(rooms, warps, most) * rooms.stage;
    return {warps, rooms.ring + warps * (in_all > rooms.sums ? in_all : rooms.sums)};
  }
  return {};
}

}  // namespace gyre::cuda
