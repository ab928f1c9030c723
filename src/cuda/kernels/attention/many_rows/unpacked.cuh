#pragma once
// Attention of many rows: operands of levels that a command writes to scratch memory ahead of the
// one that attends. Tiles lie in the order in which they are walked, those of a ring's end before
// those of its beginning, and hold what the cache's tiles hold: a walk has the same positions, so a
// row has the same bits as over the cache. Tiles are eight rows, as in the operands. Sequences of a
// batch lie one behind the other, in whole stages, as long as there is room.
#include "abi/attention.h"
#include "cuda/kernels/attention/common/formats.cuh"

namespace gyre::cuda {

// Addresses of a work tile's first tile: operands, and their keys' multipliers as scales are
// stored.
struct UnpackedTiles {
  uint64_t k, v, k_multipliers, v_multipliers;
};

constexpr uint32_t kScaleTileBytes = 2 * abi::kKvTile;
// How the command that unpacks is launched; a block takes some tiles at a time.
constexpr uint32_t kUnpackThreads = 128, kUnpackTiles = 8, kUnpackBytes = 2048,
                   kUnpackBlocks = 8;  // of a multiprocessor

// In a ring that is too short for the begin of a stage, a work tile may begin up to a stage ahead
// of the first key.
constexpr uint32_t unpacked_front(uint32_t stage_keys) { return stage_keys / abi::kKvTile + 1; }

// Tiles of a KV head, with zeros behind them for the rest of a stage and of a block's tiles;
// `keys`: that a call sees at most.
constexpr uint64_t unpacked_tiles(uint64_t capacity, uint64_t keys, uint32_t stage_keys) {
  const uint64_t all = (capacity + abi::kKvTile - 1) / abi::kKvTile + 1,
                 seen = (keys + stage_keys + abi::kKvTile - 1) / abi::kKvTile + 2;
  return (all < seen ? all : seen) + unpacked_front(stage_keys) + stage_keys / abi::kKvTile +
         kUnpackTiles - 1;
}
constexpr uint64_t unpacked_head_bytes(uint64_t tiles, uint32_t k_dim, uint32_t v_dim) {
  return tiles * (uint64_t{k_dim + v_dim} * abi::kKvTile * 2 + 2 * kScaleTileBytes);
}
// Tiles of a sequence in pages, at most.
constexpr uint64_t unpacked_page_tiles(uint64_t keys, uint32_t stage_keys) {
  return ((keys + stage_keys - 1) / stage_keys + 1) * (stage_keys / abi::kKvTile);
}

}  // namespace gyre::cuda
