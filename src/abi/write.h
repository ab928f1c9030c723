#pragma once
// A write: tokens of K and V go to a cache. kv_quantize, kv_append, kv_write and, behind the
// rotation, rope_append differ only in where a token goes:
//   a range   consecutive slots of one ring (kv_quantize)
//   a state   sink tokens, body and tail of a KvCache, as its state in device memory says
//   slots     slots in pages, from a list in device memory that may hold anything (kv_write)
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "abi/kv_state.h"
#include "abi/kv_walk.h"

namespace gyre::abi {

struct WriteSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat; kv_quantize: 0 with V alone
  uint8_t v_format;      // kv_quantize: 0 with K alone
  uint8_t calibrated;    // streams whose source is calibrated rows: 1 K, 2 V
  uint8_t slot_bytes;    // kv_write: 4 or 8, for i32 or i64 slots; the others: 0
  uint8_t lane_quads;    // kv_write of few tokens: kv_lane_quads; 0: many
  uint8_t unused[2];
};

// A list of few slots is looked through for every row of every token. A command takes at most
// kWriteMaxTokens; the next one has the tokens behind them.
GYRE_CONSTANT uint64_t kWriteFewTokens = 256, kWriteMaxTokens = 2048;

// Few tokens are too little work for a worker to each tile: rows are. A row of K or V has 32 lanes,
// each with this many times four coordinates: 1, 2 or 4. 0: rows that are written in tiles only.
struct KvRowShape {
  uint32_t k_format, v_format;  // KvFormat
  uint64_t k_dim, v_dim;
};
constexpr uint32_t kv_lane_quads(const KvRowShape rows) {
  if (kv_is_mlx_native(rows.k_format) || kv_is_mlx_native(rows.v_format)) return 0;
  const uint64_t dim = rows.k_dim > rows.v_dim ? rows.k_dim : rows.v_dim;
  if (rows.k_dim % 4 != 0 || rows.v_dim % 4 != 0 || dim > 512) return 0;
  return dim <= 128 ? 1 : (dim <= 256 ? 2 : 4);
}

// Tokens [first_token, first_token + tokens) of a source go to consecutive slots of a ring, which
// they wrap at most once. Its tiles hold at least one of these slots each, none of them twice.
struct SlotRun {
  uint64_t first_token, tokens;
  uint64_t first_slot, capacity;
  uint64_t first_tile, tiles, all_tiles;

  constexpr uint64_t tile(uint64_t index) const {
    const uint64_t at = first_tile + index;
    return at < all_tiles ? at : at - all_tiles;
  }
  constexpr bool has(uint64_t slot) const { return slot < capacity && nth(slot) < tokens; }
  constexpr uint64_t token(uint64_t slot) const { return first_token + nth(slot); }
  constexpr uint64_t nth(uint64_t slot) const {
    return slot >= first_slot ? slot - first_slot : slot + capacity - first_slot;
  }
};

// tokens: at most capacity. first_slot: below it.
constexpr SlotRun slot_run(uint64_t first_token, uint64_t tokens, uint64_t first_slot,
                           uint64_t capacity) {
  SlotRun run = {first_token, tokens, first_slot, capacity, first_slot / kKvTile, 0, 0};
  run.all_tiles = (capacity + kKvTile - 1) / kKvTile;
  if (tokens == 0) return run;
  const uint64_t end = first_slot + tokens;
  const uint64_t last_tile = (end <= capacity ? end - 1 : end - capacity - 1) / kKvTile;
  run.tiles = last_tile - run.first_tile + 1 + (end <= capacity ? 0 : run.all_tiles);
  if (run.tiles > run.all_tiles) run.tiles = run.all_tiles;
  return run;
}

// Slot s is slot s % page_tokens of page s / page_tokens; its bytes begin page * page_stride behind
// those of page 0.
struct WritePages {
  uint64_t pages;
  uint64_t page_stride;
  uint32_t page_tokens;
  uint32_t slot_bytes;  // 4 or 8
};

// Strides in bytes. With a state, sink tokens and tail are f16 and lie in one block of memory, the
// sink tokens first.
struct WriteStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  KvCacheLayout cache;  // of a page, if tokens go to slots
  uint64_t sinks_head_stride;
  uint64_t tail_head_stride;
  uint64_t tail_offset;
};

GYRE_CONSTANT uint32_t kWriteRange = 0, kWriteState = 1, kWriteSlots = 2;

struct WriteParams {
  uint64_t tokens;  // a range: at most its capacity; a state: at most the slots of the tail's ring
  uint64_t heads;
  uint32_t first_stream;  // 0: K, 1: V alone
  uint32_t streams;       // how many from there on
  uint32_t where;         // kWriteRange: run, kWriteState: places, kWriteSlots: pages
  uint32_t unused;
  union {
    SlotRun run;
    KvPlaces places;
    WritePages pages;
  };
  WriteStream stream[2];  // K, V
};

// Keys of the step that a command stores: a step longer than what was recorded has no more.
inline KvKeys append_keys(const GYRE_PARAMS WriteParams& p, const GYRE_THREAD KvState& state) {
  return {state.start, kv_least(state.length, state.start + p.tokens)};
}

// Tokens of the step that enter the body: those behind the sink tokens.
inline SlotRun append_run(const GYRE_PARAMS WriteParams& p, const GYRE_THREAD KvState& state) {
  const KvKeys keys = append_keys(p, state);
  const uint64_t first_key = kv_max(keys.begin, p.places.sink_tokens);
  const uint64_t end_key = kv_max(keys.end, first_key), capacity = p.places.body_capacity;
  return slot_run(first_key - keys.begin, end_key - first_key,
                  kv_slot(first_key - p.places.sink_tokens, capacity), capacity);
}
// Where keys enter the body is known on the device only; a step has at most these tiles.
inline uint64_t append_max_tiles(const GYRE_PARAMS WriteParams& p) {
  const uint64_t tiles = (p.tokens + 3 * kKvTile - 2) / kKvTile;
  return kv_least(tiles, (p.places.body_capacity + kKvTile - 1) / kKvTile);
}

// Where the 16-bit row of a key begins, counted from the first byte of sink tokens and tail;
// kNoF16Row: it has none.
GYRE_CONSTANT uint64_t kNoF16Row = ~uint64_t{0};
inline uint64_t append_f16_offset(const GYRE_PARAMS KvPlaces& places,
                                  const GYRE_PARAMS WriteStream& s, uint64_t key, uint64_t head) {
  const uint64_t row_bytes = 2 * uint64_t{s.cache.head_dim};
  if (key < places.sink_tokens) return head * s.sinks_head_stride + key * row_bytes;
  if (places.tail_capacity == 0) return kNoF16Row;
  return s.tail_offset + head * s.tail_head_stride + kv_slot(key, places.tail_capacity) * row_bytes;
}

// The list of a write to slots. Slots: called with a token, returns its slot as 64 bits. A tile has
// one writer, whatever the order of the list: that of the first of its tokens. Of tokens that name
// one slot the last is kept.
GYRE_CONSTANT uint64_t kNoTile = ~uint64_t{0};
template <class Slots>
struct SlotList {
  Slots slots;
  uint64_t tokens;
  uint64_t count;  // slots of the pages

  uint64_t slot(uint64_t token) const { return slots(token); }
  // A negative slot is beyond every count.
  uint64_t tile(uint64_t token) const {
    const uint64_t s = slots(token);
    return s < count ? s / kKvTile : kNoTile;
  }
  // Whether one of the tokens [begin, end) goes to the tile of slot `first` on. A count, so that
  // compilers make vectors of it.
  bool any(uint64_t begin, uint64_t end, uint64_t first) const {
    uint64_t found = 0;
    for (uint64_t t = begin; t < end; ++t) found += slots(t) - first < kKvTile ? 1 : 0;
    return found != 0;
  }
  bool leads(uint64_t token) const {
    const uint64_t own = tile(token), first = own * kKvTile;
    if (own == kNoTile) return false;
    if (token != 0 && any(token - 1, token, first)) return false;  // usually decides
    return !any(0, token, first);
  }
};

}  // namespace gyre::abi
