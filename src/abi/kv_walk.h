#pragma once
// Where consecutive keys of a cache lie: in one ring of slots, or in pages that a table names. A
// cache without pages is a ring of `capacity` slots (a linear one never
// reaches its end) in tiles of 8, and attention reads it tile by tile: up to the ring's end, then
// from its beginning. Templates on the unsigned integer that slots are counted in.
#include "abi/kv_codec.h"

namespace gyre::abi {

// Slot of the key `place` slots after slot 0, over the ring's end as often as need be.
template <class UInt>
constexpr UInt kv_slot(UInt place, UInt capacity) {
  if (place < capacity) return place;
  // On a GPU a division of 64 bits takes ten times as long as one of 32, which mostly does.
  if (sizeof(UInt) > 4 && uint64_t{place} >> 32 == 0)
    return static_cast<uint32_t>(place) % static_cast<uint32_t>(capacity);
  return place % capacity;
}

// Tiles that lie side by side, and the walk's positions [begin, end) that have keys there.
template <class UInt>
struct KvRun {
  UInt tile, tiles;
  UInt begin, end;
};

// Tiles are numbered in the order in which they are read; positions count their slots: position p
// is slot p % 8 of tile p / 8. Part a goes up to the ring's end, part b from its beginning.
template <class UInt>
struct KvWalk {
  static GYRE_CONSTANT UInt kTile = kKvTile;
  static GYRE_CONSTANT UInt kNoKey = ~UInt{0};

  UInt first_tile, tiles_a, tiles;
  UInt skip, end_a, end_b;  // positions with keys are [skip, end_a) and [8 tiles_a, end_b)
  UInt starts_a,
      starts_b;  // at this many positions, from skip and 8 tiles_a on, a whole chunk begins

  // Where the index-th tile is in the cache.
  constexpr UInt tile(UInt index) const {
    return index < tiles_a ? first_tile + index : index - tiles_a;
  }
  constexpr UInt slot(UInt position) const {
    return tile(position / kTile) * kTile + position % kTile;
  }
  // Whether all positions of the chunk that begins there have keys, in consecutive slots.
  constexpr bool whole(UInt begin) const {
    return begin - skip < starts_a || begin - tiles_a * kTile < starts_b;
  }
  constexpr bool valid(UInt position) const {
    if (position < tiles_a * kTile) return position >= skip && position < end_a;
    return position < end_b;
  }
  // Number of the key at a valid position, counted from the walk's first.
  constexpr UInt key_at(UInt position) const {
    if (position < tiles_a * kTile) return position - skip;
    return position - tiles_a * kTile + (end_a - skip);
  }
  // As key_at, or kNoKey where there is none. Selects, no branches: GPUs call it in inner loops.
  constexpr UInt key_of(UInt position) const {
    const bool a = position < tiles_a * kTile;
    const UInt before = a ? skip : tiles_a * kTile - (end_a - skip);
    const bool valid = (position < (a ? end_a : end_b)) & (!a | (position >= skip));
    return valid ? position - before : kNoKey;
  }
  // As many tiles as lie side by side from index < tiles on, at most `limit`.
  constexpr KvRun<UInt> run(UInt index, UInt limit) const {
    const bool a = index < tiles_a;
    const UInt left = (a ? tiles_a : tiles) - index, count = left < limit ? left : limit;
    const UInt begin = index * kTile, end = begin + count * kTile, keys_end = a ? end_a : end_b;
    return {tile(index), count, a && begin < skip ? skip : begin, end < keys_end ? end : keys_end};
  }
};

// Entry of a sequence's row of the table that names the page of a key. With `ring_entries` a page
// is used again when it has fallen off the front.
template <class UInt>
constexpr UInt kv_page_entry(UInt key, UInt page_tokens, UInt first_entry, UInt ring_entries) {
  const UInt nth = key / page_tokens;
  return first_entry + (ring_entries == 0 ? nth : nth % ring_entries);
}

// Keys [begin, end) that are read together: they lie in one page and in one block of `block_keys`,
// counted from key 0. So a row's sums do not depend on where a walk begins.
template <class UInt>
struct KvPageRun {
  UInt begin, end;
  UInt tile;  // of the page, where `begin` lies
};

template <class UInt>
constexpr KvPageRun<UInt> kv_page_run(UInt begin, UInt last, UInt page_tokens, UInt block_keys) {
  const UInt place = begin % page_tokens;
  const UInt in_page = page_tokens - place, in_block = block_keys - begin % block_keys;
  const UInt limit = in_page < in_block ? in_page : in_block;
  return {begin, last - begin < limit ? last : begin + limit, place / kKvTile};
}

struct KvWalkAsIs {
  template <class UInt>
  constexpr UInt operator()(UInt field) const {
    return field;
  }
};

// The walk over `count` keys, at most `capacity`, from `slot` < capacity on, which are read
// `chunk_keys` at a time. A walk without keys may have a tile, without keys. `pin` is applied to
// each field before others are computed from it: a kernel may keep them in registers that way.
template <class UInt, class Pin = KvWalkAsIs>
constexpr KvWalk<UInt> kv_walk(UInt capacity, UInt slot, UInt count, UInt chunk_keys,
                               const GYRE_THREAD Pin& pin = {}) {
  constexpr UInt kTile = kKvTile;
  KvWalk<UInt> w = {};
  const UInt count_a = count < capacity - slot ? count : capacity - slot;
  const UInt count_b = count - count_a;
  w.first_tile = pin(slot / kTile);
  w.skip = pin(slot % kTile);
  w.end_a = pin(w.skip + count_a);
  w.tiles_a = pin((w.end_a + kTile - 1) / kTile);
  w.end_b = pin(w.tiles_a * kTile + count_b);
  w.tiles = pin((w.end_b + kTile - 1) / kTile);
  w.starts_a = pin(count_a < chunk_keys ? UInt{0} : count_a - chunk_keys + 1);
  w.starts_b = pin(count_b < chunk_keys ? UInt{0} : count_b - chunk_keys + 1);
  return w;
}

}  // namespace gyre::abi
