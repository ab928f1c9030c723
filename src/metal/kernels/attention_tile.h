#pragma once
// What a thread group of attention works on: some rows of one KV head, and a range of keys that is
// walked in tiles of 8 slots. Every thread knows it.
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "metal/kernels/attention_arguments.h"
#include "metal/kernels/attention_layout.h"
#include "metal/kernels/cache_state.h"

namespace gyre {
namespace metal {

struct TileAt {
  ulong offset, tile;  // of a page, `offset` bytes on, or of the cache
};

struct RowTile {
  abi::RowMask<long> mask;
  abi::KvWalk<ulong> walk;
  long walk_key;             // of the walk's first key
  long first_key, last_key;  // of the split
  ulong kv_head, split;
  ulong first_row, first_token;  // of the KV head's rows, in the call or in the sequence
  ulong base_tile;               // over pages: at the walk's position 0
  const device uint* entries;    // over pages: the sequence's row of the table
  ulong first_state, states;     // over pages: of the tile's rows in a split's states, and of all
  uint rows;
  bool invalid;  // over pages: rows that make no sense

  bool has_keys(ulong tile) const { return tile < walk.tiles && (tile + 1) * 8 > walk.skip; }
  bool holds_key(ulong position) const {
    return position < walk.tiles * abi::kKvTile && walk.valid(position);
  }
  long key_of(ulong position) const { return walk_key + static_cast<long>(walk.key_at(position)); }
  abi::RowBounds<long> bounds(ulong token) const {
    return abi::row_bounds<long>(mask, static_cast<long>(token), first_key, last_key);
  }
};

struct RowPlace {
  ulong token, head;  // token: of the call, or of the sequence
};
inline RowPlace row_place(const thread RowTile& tile, uint group, uint row) {
  const ulong at = tile.first_row + row;
  const ulong token = static_cast<uint>(at) / group;  // a KV head has less than 2^32 rows
  return {token, tile.kv_head * group + at - token * group};
}

// The index-th tile of the walk. Entries are device data: one that is no page is not used, and
// shows in the rows.
inline TileAt tile_at(const thread RowTile& tile, constant abi::KvTable& table, bool paged,
                      ulong index, thread bool& invalid) {
  if (!paged) return {0, tile.walk.tile(index)};
  const uint page_tiles = table.page_tokens / abi::kKvTile;
  const uint at = static_cast<uint>(tile.base_tile + index), nth = at / page_tiles;
  const uint entry = table.ring_entries == 0 ? nth : nth % table.ring_entries;
  ulong page = tile.entries[entry];
  if (page >= table.pages) {
    invalid = true;
    page = 0;
  }
  return {page * table.page_stride, at - nth * page_tiles};
}

// Begins at a multiple of the block's keys, so that a row's bits do not depend on the rows beside
// it; not in a ring that is too short for that.
inline void place_walk(thread RowTile& tile, constant abi::AttentionParams& p, ulong block_keys) {
  const long begin = tile.bounds(row_place(tile, p.group, 0).token).begin;
  const long end = tile.bounds(row_place(tile, p.group, tile.rows - 1).token).end;
  tile.walk_key = begin;
  if (end <= begin) return;
  const ulong last = static_cast<ulong>(end), from = static_cast<ulong>(begin);
  const ulong base = from / block_keys * block_keys;
  if (tile.entries != nullptr) {
    tile.base_tile = base / abi::kKvTile;
    tile.walk.skip = from - base;
    tile.walk.end_a = last - base;
    tile.walk.tiles_a = (tile.walk.end_a + abi::kKvTile - 1) / abi::kKvTile;
    tile.walk.tiles = tile.walk.tiles_a;
    tile.walk.end_b = tile.walk.tiles_a * abi::kKvTile;
    return;
  }
  const ulong first = last - base <= p.capacity ? base : from;
  tile.walk_key = static_cast<long>(first);
  const abi::KvWalkAsIs as_is = {};
  tile.walk = abi::kv_walk<ulong>(p.capacity, abi::kv_slot<ulong>(p.ring_start + first, p.capacity),
                                  last - first, block_keys, as_is);
}

// Group x is the row tile (the last rows, which see the most keys, first), y the split, z the KV
// head.
inline bool place_cache_tile(thread RowTile& tile, constant abi::AttentionParams& p,
                             const thread AttentionPointers& at, const thread Grid& grid,
                             uint tile_rows, ulong block_keys) {
  const ulong rows = p.tokens * p.group;
  tile.kv_head = grid.group.z;
  tile.split = grid.group.y;
  tile.first_row = static_cast<ulong>(grid.groups.x - 1 - grid.group.x) * tile_rows;
  tile.rows = static_cast<uint>(abi::kv_least(rows - tile.first_row, tile_rows));
  tile.mask.length = static_cast<long>(p.length);
  tile.mask.tokens = static_cast<long>(p.tokens);
  tile.mask.window = abi::row_window<long>(p.window);
  tile.mask.causal = p.causal != 0;
  ulong begin = p.first_key, end = p.end_key, each = p.split_keys, tail_begin = p.tail_begin;
  if (grid.has(abi::arg_state)) {
    const abi::KvState state = load_state(at.state);
    const abi::KvKeys keys = abi::attention_keys(state, p);
    tile.mask.length = static_cast<long>(state.length);
    begin = keys.begin, end = keys.end, tail_begin = state.tail_begin;
    each = abi::kv_max(abi::attention_split_keys(end - begin, p.splits), p.fewest_split_keys);
  }
  const ulong first = abi::kv_least(begin + tile.split * each, end);
  const ulong last = p.partial == abi::kAttentionWhole ? end : abi::kv_least(first + each, end);
  tile.first_key = static_cast<long>(first);
  tile.last_key = static_cast<long>(last);
  abi::fill_segment<long>(tile.mask, p.segment, p.places, tail_begin);
  place_walk(tile, p, block_keys);
  return true;
}

// Over pages: the keys of the split that the group takes; none where there are fewer splits.
inline void place_split(thread RowTile& tile, ulong tokens, ulong length) {
  const long begin = tile.bounds(0).begin, end = tile.bounds(tokens - 1).end;
  const ulong first = static_cast<ulong>(begin);
  const abi::AttentionCut cut = {kSplitKeys, kMaxSplits};
  const abi::AttentionSplits splits =
      abi::sequence_splits(cut, length, first, end > begin ? static_cast<ulong>(end) : first);
  const ulong split = splits.first + tile.split;
  const ulong from = split < splits.end ? split * splits.keys : length;
  tile.first_key = static_cast<long>(from);
  tile.last_key = static_cast<long>(abi::kv_least(from + splits.keys, length));
}

inline abi::BatchSequence sequence_of(constant abi::AttentionParams& p,
                                      const thread AttentionPointers& at, ulong index) {
  const device int* const begins = pointer<int>(at.cu_seqlens_q);
  return abi::batch_sequence(p.table, p.tokens, begins[index], begins[index + 1],
                             pointer<int>(at.kv_lengths)[index]);
}
// Row tiles of one KV head of a sequence; 0: another command's, or none.
inline uint sequence_tiles(constant abi::AttentionParams& p, const thread AttentionPointers& at,
                           const thread Grid& grid, ulong index, uint tile_rows) {
  if (index >= p.table.sequences) return 0;
  const bool prompt = grid.has(abi::arg_is_prefill) && at.is_prefill[index] != 0;
  const ulong tokens = sequence_of(p, at, index).tokens;
  if (tokens == 0 ||
      !abi::attention_takes(p.phase, tokens, p.table.max_query_length, p.group, prompt))
    return 0;
  return static_cast<uint>((tokens * p.group + tile_rows - 1) / tile_rows);
}

// Group x is a row tile of some sequence, y a split of its keys, z the KV head. Each simdgroup
// finds it for itself, a sequence a lane. False: there are fewer.
inline bool place_batch_tile(thread RowTile& tile, constant abi::AttentionParams& p,
                             const thread AttentionPointers& at, const thread Grid& grid,
                             uint tile_rows, ulong block_keys) {
  const uint wanted = grid.group.x;
  uint before = 0, sequence = 0, number = 0;
  bool found = false;
  for (ulong base = 0; base < p.table.sequences && !found; base += kLanes) {
    const uint tiles = sequence_tiles(p, at, grid, base + grid.lane, tile_rows);
    uint sum = tiles;
    for (uint step = 1; step < kLanes; step *= 2) {
      const uint lower = simd_shuffle_up(sum, static_cast<ushort>(step));
      sum += grid.lane >= step ? lower : 0;
    }
    const uint first = before + sum - tiles;
    const bool here = wanted >= first && wanted - first < tiles;
    const uint owner = simd_min(here ? grid.lane : kLanes);
    found = owner < kLanes;
    if (found) {
      sequence = static_cast<uint>(base) + owner;
      number = wanted - simd_shuffle(first, static_cast<ushort>(owner));
    }
    before += simd_shuffle(sum, static_cast<ushort>(kLanes - 1));
  }
  if (!found) return false;
  const abi::BatchSequence of = sequence_of(p, at, sequence);
  tile.kv_head = grid.group.z;
  tile.split = grid.group.y;
  tile.first_state = (grid.group.x * p.kv_heads + tile.kv_head) * tile_rows;
  tile.states = grid.groups.x * p.kv_heads * tile_rows;
  tile.first_row = static_cast<ulong>(number) * tile_rows;
  tile.rows = static_cast<uint>(abi::kv_least(of.tokens * p.group - tile.first_row, tile_rows));
  tile.first_token = of.first_token;
  tile.entries = pointer<uint>(at.table) + sequence * p.table.stride + p.table.first_entry;
  tile.invalid = !of.valid;
  tile.first_key = 0;
  tile.last_key = static_cast<long>(of.length);
  tile.mask.length = static_cast<long>(of.length);
  tile.mask.tokens = static_cast<long>(of.tokens);
  tile.mask.window = abi::row_window<long>(p.window);
  tile.mask.causal = p.causal != 0;
  const device int* const tails = grid.has(abi::arg_tail_begin) ? pointer<int>(at.state) : nullptr;
  abi::fill_segment<long>(tile.mask, p.segment, p.places,
                          abi::batch_tail_begin(tails, sequence, of.length));
  if (p.partial == abi::kAttentionPartial) place_split(tile, of.tokens, of.length);
  place_walk(tile, p, block_keys);
  return true;
}

}  // namespace metal
}  // namespace gyre
