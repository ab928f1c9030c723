#pragma once
// What a block of prefill attention works on: some rows of one KV head and a range of keys, which
// are walked in tiles of 8 slots, a stage at a time.
#include "abi/attention.h"
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

// A 64-bit division takes ten times as long as a 32-bit one, which is mostly enough.
inline uint64_t divide(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// In shared memory: registers are for sums.
struct RowTile {
  abi::AttentionParams params;
  uint32_t tile_rows, stage_keys;  // at most
  abi::RowMask<int64_t> mask;
  abi::KvWalk<uint64_t> walk;
  int64_t walk_key;    // of the walk's first key
  uint64_t first_row;  // of the KV head's rows
  uint32_t rows;
  mutable uint32_t invalid;  // over pages: rows that make no sense, or a page that does not exist
  uint64_t index, count;     // of this work tile, and how many there are
  uint64_t kv_head, group, split;
  int64_t first_key, last_key;                             // of the split
  const uint8_t *k_codes, *k_scales, *v_codes, *v_scales;  // of the head
  // Over pages: the sequence, its row of the page table, its first row of q, and the tile at the
  // walk's position 0. Without: none, and 0.
  const uint32_t* entries;
  uint64_t sequence, first_token, base_tile;
  // Its work tiles are numbers [begin, begin + count). `rows`, of a KV head: 0 until
  // place_sequence.
  struct OfSequence {
    uint64_t begin, count, rows;
    uint32_t is_valid;
  } of_sequence;
  // What find_unpacked_end returns; in unpacked tiles, where this sequence's tile 0 would lie.
  uint64_t unpacked_end, unpacked_at;

  // A KV head has less than 2^32 rows: more queries than fit into any memory.
  uint64_t token(uint32_t row) const {
    return static_cast<uint32_t>(first_row + row) / static_cast<uint32_t>(group);
  }
  uint64_t head(uint32_t row) const {
    return kv_head * group + first_row + row - token(row) * group;
  }
  abi::RowBounds<int64_t> bounds(uint64_t token) const {
    return abi::row_bounds(mask, static_cast<int64_t>(token), first_key, last_key);
  }
  int64_t key_of(uint64_t position) const {
    return walk_key + static_cast<int64_t>(walk.key_at(position));
  }
  bool holds_key(uint64_t position) const {
    return position < walk.tiles * abi::kKvTile && walk.valid(position);
  }
  uint32_t stage_count() const {
    return static_cast<uint32_t>((walk.tiles * abi::kKvTile + stage_keys - 1) / stage_keys);
  }
  // Where the index-th tile of the walk lies: of a page, `offset` bytes on, or of the
  // cache.
  struct TileAt {
    uint64_t offset, tile;
  };
  bool paged() const { return params.table.page_tokens != 0; }
  TileAt page_tile(uint64_t tile) const;
  TileAt tile_at(uint64_t tile) const {
    return paged() ? page_tile(tile) : TileAt{0, walk.tile(tile)};
  }
  // Bytes from a head's first row to that of a position, of one cache.
  uint64_t row_offset(uint64_t position, uint64_t tile_stride) const {
    const TileAt at = tile_at(position / abi::kKvTile);
    return at.offset +
           (at.tile * abi::kKvTile + position % abi::kKvTile) * (tile_stride / abi::kKvTile);
  }
};

// Tile `at` of a sequence in pages. Entries are device data: one that is no page is not used, and
// shows in the rows.
inline RowTile::TileAt page_tile_at(const abi::KvTable& table, const uint32_t* entries, uint64_t at,
                                    bool& is_page) {
  const uint64_t page_tiles = table.page_tokens / abi::kKvTile;
  // Tiles and entries have less than 2^32 either.
  const uint64_t nth = static_cast<uint32_t>(at) / static_cast<uint32_t>(page_tiles);
  const uint64_t entry =
      table.ring_entries == 0 ? nth : static_cast<uint32_t>(nth) % table.ring_entries;
  const uint64_t page = entries[entry];
  is_page = page < table.pages;
  return {is_page ? page * table.page_stride : 0, at - nth * page_tiles};
}
inline RowTile::TileAt RowTile::page_tile(uint64_t tile) const {
  bool is_page = true;
  const TileAt at = page_tile_at(params.table, entries, base_tile + tile, is_page);
  if (!is_page) atomicOr(&invalid, 1u);
  return at;
}

inline void place_head(RowTile& problem, const Args& args) {
  using enum abi::AttentionArg;
  const abi::AttentionParams& p = problem.params;
  const auto of_head = [&](uint64_t address, uint64_t stride) {
    return pointer<const uint8_t>(address) + problem.kv_head * stride;
  };
  problem.k_codes = of_head(args.at[arg_k_codes], p.k.codes_head_stride);
  problem.k_scales = of_head(args.at[arg_k_scales], p.k.scales_head_stride);
  problem.v_codes = of_head(args.at[arg_v_codes], p.v.codes_head_stride);
  problem.v_scales = of_head(args.at[arg_v_scales], p.v.scales_head_stride);
}

// The walk over the keys that some row of the tile sees. It begins at a multiple of the stage's
// keys, so that a row's bits do not depend on the rows beside it; not in a ring that is too short
// for that.
inline void place_walk(RowTile& problem) {
  const abi::AttentionParams& p = problem.params;
  // Bounds grow with the token: the first row's begin and the last one's end contain all.
  const int64_t begin = problem.bounds(problem.token(0)).begin,
                end = problem.bounds(problem.token(problem.rows - 1)).end;
  problem.walk_key = begin;
  problem.walk = {};
  if (end <= begin) return;  // the capacity may be 0
  const auto stage = static_cast<uint64_t>(problem.stage_keys);
  const uint64_t last = static_cast<uint64_t>(end),
                 base = divide(static_cast<uint64_t>(begin), stage) * stage;
  const uint64_t first = last - base <= p.capacity ? base : static_cast<uint64_t>(begin);
  problem.walk_key = static_cast<int64_t>(first);
  problem.walk = abi::kv_walk<uint64_t>(p.capacity, abi::kv_slot(p.ring_start + first, p.capacity),
                                        last - first, stage);
}

// The rows and keys of a work tile; neighbouring tiles share keys. One thread.
inline void place_work_tile(RowTile& problem, const Args& args) {
  const abi::AttentionParams& p = problem.params;
  const uint64_t rows = p.tokens * problem.group,
                 tiles = (rows + problem.tile_rows - 1) / problem.tile_rows;
  const uint64_t head_and_split = divide(problem.index, tiles),
                 head = divide(head_and_split, p.splits);
  problem.split = head_and_split - head * p.splits;
  problem.kv_head = head;
  // The last rows, which see the most keys, first: blocks end together that way.
  problem.first_row = (tiles - 1 - (problem.index - head_and_split * tiles)) * problem.tile_rows;
  problem.rows = static_cast<uint32_t>(abi::kv_least(rows - problem.first_row, problem.tile_rows));
  place_head(problem, args);
  const uint64_t first = abi::kv_least(p.first_key + problem.split * p.split_keys, p.end_key);
  const uint64_t last = p.partial == 0 ? p.end_key : abi::kv_least(first + p.split_keys, p.end_key);
  problem.first_key = static_cast<int64_t>(first), problem.last_key = static_cast<int64_t>(last);
  problem.mask = {static_cast<int64_t>(p.length), static_cast<int64_t>(p.tokens),
                  abi::row_window<int64_t>(p.window), p.causal != 0};
  abi::fill_segment(problem.mask, p.segment, p.places, p.tail_begin);
  place_walk(problem);
}

}  // namespace gyre::cuda
