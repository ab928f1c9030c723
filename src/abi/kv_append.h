#pragma once
// kv_append: the tokens of a step go to the sink tokens, or to the body and the tail's ring.
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "abi/kv_state.h"
#include "abi/kv_walk.h"

namespace gyre::abi {

struct KvAppendSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat of the body
  uint8_t v_format;
  uint8_t calibrated;  // streams whose source is calibrated rows: 1 K, 2 V
  uint8_t unused[4];
};

// Strides in bytes. Sink tokens and tail are f16 and lie in one piece of memory, the sink tokens
// first.
struct KvAppendStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint64_t sinks_head_stride;
  uint64_t tail_head_stride;
  uint64_t tail_offset;
  KvCacheLayout body;
};

struct KvAppendParams {
  uint64_t tokens;  // at most the slots of the tail's ring
  uint64_t heads;
  KvPlaces places;
  KvAppendStream stream[2];
};

// Where the 16-bit row of a key begins, counted from the first byte of sink tokens and tail;
// kNoNear: it has none.
GYRE_CONSTANT uint64_t kNoNear = ~uint64_t{0};
inline uint64_t append_near_offset(const GYRE_PARAMS KvPlaces& places,
                                   const GYRE_PARAMS KvAppendStream& s, uint64_t key,
                                   uint64_t head) {
  const uint64_t row_bytes = 2 * uint64_t{s.body.head_dim};
  if (key < places.sink_tokens) return head * s.sinks_head_stride + key * row_bytes;
  if (places.tail_capacity == 0) return kNoNear;
  return s.tail_offset + head * s.tail_head_stride + kv_slot(key, places.tail_capacity) * row_bytes;
}

// Keys of the step that a command stores: a step longer than what was recorded has no more.
inline KvKeys append_keys(const GYRE_PARAMS KvAppendParams& p, const GYRE_THREAD KvState& state) {
  return {state.start, kv_least(state.length, state.start + p.tokens)};
}

// Tiles of the body that keys [first_key, end_key) enter: a run that may wrap, never a tile twice.
struct AppendRun {
  uint64_t first_key, end_key;
  uint64_t first_slot;
  uint64_t first_tile, tiles, all_tiles;

  constexpr uint64_t tile(uint64_t index) const {
    const uint64_t at = first_tile + index;
    return at < all_tiles ? at : at - all_tiles;
  }
  // Key that enters a slot, if it is below end_key.
  constexpr uint64_t key_of(uint64_t slot, uint64_t capacity) const {
    return first_key + (slot >= first_slot ? slot - first_slot : slot + capacity - first_slot);
  }
};

inline AppendRun append_run(const GYRE_PARAMS KvAppendParams& p, const GYRE_THREAD KvState& state) {
  const KvKeys keys = append_keys(p, state);
  const uint64_t capacity = p.places.body_capacity;
  AppendRun run = {};
  run.first_key = kv_most(keys.begin, p.places.sink_tokens);
  run.end_key = kv_most(keys.end, run.first_key);
  run.all_tiles = (capacity + kKvTile - 1) / kKvTile;
  run.first_slot = kv_slot(run.first_key - p.places.sink_tokens, capacity);
  run.first_tile = run.first_slot / kKvTile;
  const uint64_t count = run.end_key - run.first_key;
  if (count == 0) return run;
  const bool cut = run.first_slot + count > capacity && capacity % kKvTile != 0;
  const uint64_t slots = run.first_slot % kKvTile + count + (cut ? kKvTile : 0);
  run.tiles = kv_least(run.all_tiles, (slots + kKvTile - 1) / kKvTile);
  return run;
}

}  // namespace gyre::abi
