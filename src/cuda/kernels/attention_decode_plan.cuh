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

// A warp has all of its keys' coordinates if they are up to 256. Longer keys would leave room for
// few warps: neighbouring ones share them, 128 coordinates each.
constexpr uint32_t decode_own(uint32_t n) { return n <= 256 ? n : 128; }
constexpr uint32_t decode_parts(uint32_t n) { return n / decode_own(n); }

// What is read at once lies in different banks: two neighbouring rows of each of four tiles, or
// eight coordinates of each of four tiles.
struct DecodePlane {
  uint32_t bytes;       // of a row (K, 16-bit V) or a tile (V in levels), of one part
  uint32_t from;        // where its first part begins in the stored row or tile
  uint32_t tile_pitch;  // bytes from tile to tile
  uint32_t at;          // in the stage
};

struct DecodeShape {
  bool fits;             // formats and head dim can be worked on so
  uint32_t keys, tiles;  // that a warp takes at a time
  uint32_t blocks;       // scales of a key: a warp has them all
  DecodePlane k[2], v[2];
  uint32_t k_row, v_tile;  // bytes from one to the next, as stored, of levels
  uint32_t k_scales, v_scales, bytes;
};

// Of a key's levels that a warp has, K and V; 0 where they are not both levels.
constexpr uint32_t decode_bits(uint32_t k, uint32_t v, uint32_t n) {
  const bool levels = abi::kv_is_native(k) && abi::kv_is_native(v);
  return levels ? decode_own(n) * (abi::kv_bits(k) + abi::kv_bits(v)) : 0;
}
// Eight warps with many registers each do better than more with fewer, but around tq3 and tq4 at
// head_dim 128. A cluster's splits are short.
constexpr bool decode_twelve(uint32_t k, uint32_t v, uint32_t n, uint32_t rows, uint32_t cluster) {
  const uint32_t bits = decode_bits(k, v, n);
  return n == 128 && rows == 4 && cluster < 8 && bits >= 768 && bits <= 1024;
}

// 16 keys to a product with 16-bit values, 32 with levels: a tile to each of four lanes. Two such
// products at a time wait less, but ask for twice as much at once; measured, that pays for small
// keys, for tq8 with tq4 where splits are long, and where warps that share keys wait for each
// other.
constexpr uint32_t decode_keys(uint32_t k, uint32_t v, uint32_t n, uint32_t rows,
                               uint32_t cluster) {
  if (!abi::kv_is_native(v)) return 16;
  const uint32_t bits = decode_bits(k, v, n);
  if (bits == 0 || n == 256 || rows != 4 || decode_twelve(k, v, n, rows, cluster)) return 32;
  const bool two =
      decode_parts(n) > 1 ? bits <= 1024 : bits <= 768 || (bits == 1536 && cluster < 8);
  return two ? 64 : 32;
}

constexpr DecodeShape decode_shape(uint32_t k, uint32_t v, uint32_t n, uint32_t rows,
                                   uint32_t cluster) {
  const bool k_levels = abi::kv_is_native(k), v_levels = abi::kv_is_native(v);
  DecodeShape a = {};
  a.keys = decode_keys(k, v, n, rows, cluster);
  a.tiles = a.keys / abi::kKvTile;
  a.blocks = n <= abi::kKvScaleBlock ? 1 : n / abi::kKvScaleBlock;
  a.fits = is_staged(k) && is_staged(v) && (n == 64 || n == 128 || n == 256 || n == 512);
  const uint32_t own = decode_own(n), parts = decode_parts(n);
  uint32_t at = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bytes = own * decode_plane_bits(k, i) / 8;
    const uint32_t pad = bytes == 32 ? 64 : (bytes == 16 ? 32 : 0);
    a.k[i] = {bytes, a.k_row, 8 * bytes + pad, at};
    a.fits = a.fits && bytes % 16 == 0;  // else rows do not begin where 16 bytes can be copied
    a.k_row += parts * bytes;
    at = round_up(at + a.tiles * a.k[i].tile_pitch, 128);
  }
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t bits = decode_plane_bits(v, i), bytes = v_levels ? own * bits : own * bits / 8;
    const uint32_t pitch = v_levels ? round_up(bytes + 96, 128) - 96 : 8 * bytes;
    a.v[i] = {bytes, a.v_tile, bits == 0 ? 0 : pitch, at};
    a.v_tile += parts * bytes;
    at = round_up(at + a.tiles * a.v[i].tile_pitch, 128);
  }
  a.k_scales = at;
  if (k_levels) at += a.tiles * a.blocks * 16;
  a.v_scales = at;
  if (v_levels) at += a.tiles * a.blocks * 16;
  a.bytes = round_up(at, 128);
  return a;
}

constexpr uint32_t kDecodeMostWarps = 12, kDecodeMostRows = abi::kAttentionRows;
constexpr uint32_t kDecodeFewestStages = 2;

constexpr uint32_t eights(uint32_t rows) { return (rows + 7) / 8; }

// Shared memory of a block: states, queries as fragments, rows of floats (of the block, or of all
// blocks of a cluster), scores on their way from one arrangement to another or to the warps that
// have other parts of the keys, and a ring of stages for each warp. A warp's sums lie where its
// keys were.
struct DecodeRooms {
  uint32_t queries, wide, turn, swap, ring;  // where they begin
  uint32_t turned, swapped;                  // bytes of one warp's scores
  uint32_t warps;                            // that registers are enough for
  uint32_t parts;                            // warps that share keys
  bool three;                                // stages pay: a byte is much work
  uint32_t stage, sums;                      // bytes of a stage, and of one warp's sums

  // Of one warp, with so many stages.
  constexpr uint32_t warp(uint32_t stages) const {
    return stages * stage > sums ? stages * stage : sums;
  }
};

constexpr uint32_t kDecodeStateBytes = 5248;
// Floats of a row of a warp's sums. What a warp writes at once, four or eight rows, lies in
// different banks.
constexpr uint32_t decode_sums_pitch(uint32_t v, uint32_t own) {
  return own < 128 && abi::kv_is_native(v) ? own + 2 : own + 4;
}

constexpr DecodeRooms decode_rooms(uint32_t k, uint32_t v, uint32_t n, uint32_t rows,
                                   uint32_t cluster) {
  DecodeRooms a = {};
  const bool k_levels = abi::kv_is_native(k), v_levels = abi::kv_is_native(v);
  const DecodeShape shape = decode_shape(k, v, n, rows, cluster);
  a.queries = kDecodeStateBytes;
  a.wide = a.queries + (k_levels ? n / 32 * (rows / 4) * 256 : n / 16 * eights(rows) * 512);
  const uint32_t pushed = (rows + cluster - 1) / cluster * cluster * (n + 2);
  a.turn = round_up(a.wide + (cluster > 1 && pushed > rows * n ? pushed : rows * n) * 4, 16);
  a.turned = k_levels == v_levels ? 0 : rows * (shape.keys + 4) * 4;
  a.warps = decode_twelve(k, v, n, rows, cluster) ? 12 : 8;
  a.swap = a.turn + a.warps * a.turned;
  a.parts = decode_parts(n);
  a.swapped = a.parts == 1 ? 0 : (k_levels ? rows : 8 * eights(rows)) * shape.keys * 4;
  a.ring = round_up(a.swap + 2 * a.warps * a.swapped, 128);
  a.stage = shape.bytes;
  a.three = v_levels && (rows > 4 || n == 256);
  a.sums = round_up(rows * decode_sums_pitch(v, decode_own(n)) * 4, 128);
  return a;
}

// Registers decide how many warps a block may have, and what shared memory any GPU has.
constexpr uint32_t kDecodeMostBytes = 227 << 10;
constexpr uint32_t decode_most_warps(uint32_t k, uint32_t v, uint32_t n, uint32_t rows,
                                     uint32_t cluster) {
  const DecodeRooms rooms = decode_rooms(k, v, n, rows, cluster);
  const uint32_t by_keys = (kDecodeMostBytes - rooms.ring) / (kDecodeFewestStages * rooms.stage);
  const uint32_t warps = by_keys < rooms.warps ? by_keys : rooms.warps;
  const uint32_t step = rooms.parts > 2 ? rooms.parts : 2;
  return warps <= 4 ? 4 : warps / step * step;
}

// As many stages as keep the memory busy: more in flight at once makes it slower, but where a warp
// has much to do for a byte. Where there is less room there are fewer warps: what the kernel knows
// before it runs costs nothing in its loop.
constexpr uint32_t decode_stages(const DecodeRooms& rooms, uint32_t most_warps) {
  constexpr uint32_t kEnough = 32 << 10;
  const uint32_t one = most_warps * rooms.stage, fit = (kDecodeMostBytes - rooms.ring) / one;
  uint32_t most = 2 * one < kEnough ? 4 : (one < kEnough || rooms.three ? 3 : 2);
  constexpr uint32_t kSmall = 99 << 10;  // of many GPUs: none of them shall have no room
  if (rooms.ring + rooms.parts * rooms.warp(most) > kSmall) most = kDecodeFewestStages;
  return fit < kDecodeFewestStages ? kDecodeFewestStages : (fit < most ? fit : most);
}

struct DecodePlan {
  uint32_t warps, bytes;  // 0: there is not enough shared memory
};

// As many warps as there may be, and `alone` bytes at least, if a block may have so many: where two
// blocks lie side by side, another multiprocessor stays idle.
constexpr DecodePlan decode_plan(const DecodeRooms& rooms, uint32_t most_warps, uint32_t most,
                                 uint32_t alone) {
  if (rooms.ring >= most) return {};
  const uint32_t each = rooms.warp(decode_stages(rooms, most_warps));
  uint32_t warps = (most - rooms.ring) / each;
  if (warps > most_warps) warps = most_warps;
  warps = warps / rooms.parts * rooms.parts;
  if (warps > 4) warps = warps / 2 * 2;
  if (warps == 0) return {};
  const uint32_t bytes = rooms.ring + warps * each;
  return {warps, bytes < alone && alone <= most ? alone : bytes};
}

}  // namespace gyre::cuda
