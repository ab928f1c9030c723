#pragma once
// Attention of many rows: where unpacked operands lie; see unpacked.cuh.
#include "cuda/kernels/attention/common/row_tile.cuh"
#include "cuda/kernels/attention/many_rows/unpacked.cuh"

namespace gyre::cuda {

// The walk over all keys that a call sees.
struct UnpackedWalk {
  int64_t first;  // key
  uint64_t slot;  // its slot
  bool in_front;  // work tiles may begin ahead of it
  abi::KvWalk<uint64_t> walk;

  UnpackedWalk(const abi::AttentionParams& p, uint32_t stage_keys) {
    const uint64_t base = divide(p.first_key, stage_keys) * stage_keys;
    in_front = p.end_key > p.first_key && p.end_key - base > p.capacity;
    first = static_cast<int64_t>(in_front ? p.first_key : base);
    slot = 0, walk = {};
    if (p.end_key <= p.first_key) return;  // the capacity may be 0
    const uint64_t from = static_cast<uint64_t>(first);
    slot = abi::kv_slot(p.ring_start + from, p.capacity);
    walk = abi::kv_walk<uint64_t>(p.capacity, slot, p.end_key - from, uint64_t{stage_keys});
  }
};

// Where tile `at`, which may be in front, of a KV head lies.
inline UnpackedTiles unpacked_tiles_at(const abi::AttentionParams& p, uint64_t partial,
                                       uint64_t kv_head, int64_t at, uint32_t stage_keys) {
  const uint64_t tiles = p.unpacked_room;
  const uint32_t front = p.table.page_tokens != 0 ? 0 : unpacked_front(stage_keys);
  const uint64_t k_bytes = uint64_t{p.k.head_dim} * abi::kKvTile * 2,
                 v_bytes = uint64_t{p.v.head_dim} * abi::kKvTile * 2;
  const auto nth = static_cast<uint64_t>(at + front);
  const uint64_t k = partial + abi::kScratchCounterBytes +
                     kv_head * unpacked_head_bytes(tiles, p.k.head_dim, p.v.head_dim);
  const uint64_t v = k + tiles * k_bytes, scales = v + tiles * v_bytes;
  return {k + nth * k_bytes, v + nth * v_bytes, scales + nth * kScaleTileBytes,
          scales + (tiles + nth) * kScaleTileBytes};
}

// Where the first tile of a work tile's walk lies.
inline UnpackedTiles unpacked_tiles_of(const RowTile& tile, uint64_t partial) {
  const abi::AttentionParams& p = tile.params;
  if (tile.paged())
    return unpacked_tiles_at(p, partial, tile.kv_head,
                             static_cast<int64_t>(tile.unpacked_at + tile.base_tile),
                             tile.stage_keys);
  const UnpackedWalk all(p, tile.stage_keys);
  const auto rings = static_cast<int64_t>((p.capacity + abi::kKvTile - 1) / abi::kKvTile);
  const int64_t slot = static_cast<int64_t>(all.slot) + tile.walk_key - all.first;
  int64_t at =
      static_cast<int64_t>(tile.walk.first_tile) - static_cast<int64_t>(all.slot / abi::kKvTile);
  if (slot < 0) at -= rings;
  if (slot >= static_cast<int64_t>(p.capacity)) at += rings;
  return unpacked_tiles_at(p, partial, tile.kv_head, at, tile.stage_keys);
}

}  // namespace gyre::cuda
