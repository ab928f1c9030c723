#pragma once
// How much work a block takes: plain functions of params, for kernels and for those who launch
// them.
#include "abi/kv_cache.h"
#include "abi/rope.h"

namespace gyre::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kBlockThreads = 256;
constexpr uint32_t kChunk = 8;      // coordinates that lie together in a lane
constexpr uint32_t kFewSlots = 2;   // chunks a lane holds: up to 512 coordinates a row
constexpr uint32_t kManySlots = 4;  // up to 1024

// Lanes that share a row, `slots` chunks each.
constexpr uint32_t row_lanes(uint32_t head_dim, uint32_t slots) {
  uint32_t lanes = 4;
  while (lanes < 32 && lanes * slots * kChunk < head_dim) lanes *= 2;
  return lanes;
}
constexpr bool takes_many_slots(uint32_t head_dim) { return head_dim > kFewSlots * kChunk * 32; }
constexpr uint32_t tile_lanes(uint32_t head_dim) {
  return row_lanes(head_dim, takes_many_slots(head_dim) ? kManySlots : kFewSlots);
}
constexpr uint32_t rows_per_block(uint32_t head_dim) {
  return kBlockThreads / tile_lanes(head_dim);
}
constexpr uint32_t tiles_per_block(uint32_t head_dim) {
  return rows_per_block(head_dim) / abi::kKvTile;
}

// Floats that a thread keeps in shared memory for each slot of a row that takes many.
constexpr uint32_t kLongFloats = kChunk + 1;
constexpr uint32_t long_row_bytes(uint32_t head_dim) {
  return takes_many_slots(head_dim) ? kBlockThreads * kManySlots * kLongFloats * 4 : 0;
}

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// kv_append. What enters the body is known on the device only; this is the most that can.
constexpr uint32_t kNearLanes = 16;
constexpr uint64_t append_most_tiles(const abi::KvAppendParams& p) {
  if ((p.parts & abi::kAppendBody) == 0) return 0;
  const uint64_t keys = p.tokens + p.places.tail_capacity;
  const uint64_t tiles = divide_up(keys + 2 * abi::kKvTile - 1, abi::kKvTile);
  const uint64_t all = divide_up(p.places.body_capacity, abi::kKvTile);
  return tiles < all ? tiles : all;
}
constexpr uint64_t append_body_blocks(const abi::KvAppendParams& p, uint32_t stream) {
  return divide_up(p.heads * append_most_tiles(p), tiles_per_block(p.stream[stream].body.head_dim));
}
constexpr uint64_t append_near_blocks(const abi::KvAppendParams& p) {
  if ((p.parts & abi::kAppendNear) == 0) return 0;
  return divide_up(2 * p.heads * p.tokens, kBlockThreads / kNearLanes);
}

// rope. A unit is up to kRopeRows heads of one token, which share their angles.
constexpr uint32_t kRopeRows = 4;
constexpr uint32_t rope_run(uint32_t element_bytes) { return 16 / element_bytes; }  // pairs at once
constexpr uint32_t rope_lanes(uint64_t head_dim, uint32_t element_bytes) {
  uint32_t lanes = 1;
  while (lanes < 32 && uint64_t{lanes} * 2 * rope_run(element_bytes) < head_dim) lanes *= 2;
  return lanes;
}
constexpr uint64_t rope_groups(const abi::RopeParams& p, uint32_t stream) {
  return stream < p.streams ? divide_up(p.stream[stream].heads, kRopeRows) : 0;
}
constexpr uint64_t rope_units(const abi::RopeParams& p) {
  return p.tokens * (rope_groups(p, 0) + rope_groups(p, 1));
}

}  // namespace gyre::cuda
