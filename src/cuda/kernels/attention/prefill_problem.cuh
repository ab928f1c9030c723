#pragma once
// Prefill attention: what a block works on, up to 16 rows of one KV head and a range of keys. Keys
// are walked in tiles of 8 slots, a stage at a time.
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "cuda/kernels/attention/prefill_layout.cuh"
#include "cuda/kernels/attention/softmax.cuh"
#include "cuda/kernels/global_memory.cuh"

namespace gyre::cuda {

// A 64-bit division takes ten times as long as a 32-bit one, which is mostly enough.
inline uint64_t divide(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Of each row, in shared memory.
struct Rows {
  int64_t begin[kMostRows], end[kMostRows];  // keys it may see
  int64_t position[kMostRows];
  float factor[kMostRows][2];  // of its scores, in two steps
  SoftmaxState state[kMostRows];
  float keep[kMostRows], slope[kMostRows];
  uint32_t hidden;  // some row does not see some key of the stage
  uint32_t bad;     // over pages: rows that make no sense, or a page that is none
};

// In shared memory, too: registers are for sums.
struct PrefillProblem {
  abi::AttentionParams params;
  PrefillLayout layout;
  abi::RowMask<int64_t> mask;
  abi::KvWalk<uint64_t> walk;
  int64_t walk_key;    // of the walk's first key
  uint64_t first_row;  // of the KV head's rows
  uint32_t rows;
  uint64_t index, count;  // of this work tile, and how many there are
  uint64_t kv_head, group, split;
  int64_t first_key, last_key;                             // of the split
  const uint8_t *k_codes, *k_scales, *v_codes, *v_scales;  // of the head
  // Over pages: the sequence, its row of the page table, its first row of q, and the tile at the
  // walk's position 0. Without: none, and 0.
  const uint32_t* entries;
  uint64_t sequence, first_token, base_tile;

  uint64_t token(uint32_t row) const { return divide(first_row + row, group); }
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
  // Where the index-th tile of the walk lies: of a page that lies so many bytes on, or of the
  // cache.
  struct TileAt {
    uint64_t offset, tile;
  };
  bool paged() const { return params.table.page_tokens != 0; }
  TileAt page_tile(uint64_t tile) const;
  // Bytes from a head's first row to that of a position, of one cache.
  uint64_t row_offset(uint64_t position, uint64_t tile_stride) const {
    const TileAt at = paged() ? page_tile(position / abi::kKvTile)
                              : TileAt{0, walk.tile(position / abi::kKvTile)};
    return at.offset +
           (at.tile * abi::kKvTile + position % abi::kKvTile) * (tile_stride / abi::kKvTile);
  }
  Rows& state() const;
  static PrefillProblem& of_block();
  // Not a member: the compiler must see which memory it is.
  static unsigned char* shared() { return dynamic_shared(); }
  float* staging() const { return reinterpret_cast<float*>(shared() + layout.staging); }
  float* logits() const { return reinterpret_cast<float*>(shared() + layout.logits); }
  float2* factors() const { return reinterpret_cast<float2*>(shared() + layout.factors); }
  // Modulo by constants: a division would cost more than the load.
  unsigned char* stage(uint32_t number) const {
    const uint32_t at = layout.stages == 3 ? number % 3 : number & (layout.stages - 1);
    return shared() + layout.stage + at * layout.stage_bytes;
  }
  uint32_t stage_count() const {
    return static_cast<uint32_t>((walk.tiles * abi::kKvTile + layout.stage_keys - 1) /
                                 layout.stage_keys);
  }
};

struct PrefillState {
  Rows rows;
  PrefillProblem problem;
};
static_assert(sizeof(PrefillState) <= kPrefillStateBytes);

inline Rows& PrefillProblem::state() const {
  return reinterpret_cast<PrefillState*>(shared())->rows;
}
inline PrefillProblem& PrefillProblem::of_block() {
  return reinterpret_cast<PrefillState*>(shared())->problem;
}

// Entries are device data: one that is no page is not used, and shows in the rows.
inline PrefillProblem::TileAt PrefillProblem::page_tile(uint64_t tile) const {
  const abi::KvTable& table = params.table;
  const uint64_t page_tiles = table.page_tokens / abi::kKvTile, at = base_tile + tile;
  const uint64_t nth = divide(at, page_tiles);
  const uint64_t entry =
      table.ring_entries == 0 ? nth : nth - divide(nth, table.ring_entries) * table.ring_entries;
  uint64_t page = entries[entry];
  if (page >= table.pages) {
    atomicOr(&state().bad, 1u);
    page = 0;
  }
  return {page * table.page_stride, at - nth * page_tiles};
}

inline void place_head(PrefillProblem& problem, const Args& args) {
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

// The rows and keys of a work tile; neighbouring tiles share keys. One thread.
inline void place_work_tile(PrefillProblem& problem, const Args& args) {
  const abi::AttentionParams& p = problem.params;
  const uint64_t rows = p.tokens * problem.group,
                 tiles = (rows + problem.layout.rows - 1) / problem.layout.rows;
  const uint64_t piece = divide(problem.index, tiles), head = divide(piece, p.splits);
  problem.split = piece - head * p.splits;
  problem.kv_head = head;
  problem.first_row = (problem.index - piece * tiles) * problem.layout.rows;
  problem.rows =
      static_cast<uint32_t>(abi::kv_least(rows - problem.first_row, problem.layout.rows));
  place_head(problem, args);
  const uint64_t first = abi::kv_least(p.first_key + problem.split * p.split_keys, p.end_key);
  const uint64_t last = p.partial == 0 ? p.end_key : abi::kv_least(first + p.split_keys, p.end_key);
  problem.first_key = static_cast<int64_t>(first), problem.last_key = static_cast<int64_t>(last);
  problem.mask = {static_cast<int64_t>(p.length), static_cast<int64_t>(p.tokens),
                  abi::row_window<int64_t>(p.window), p.causal != 0};
  abi::fill_segment(problem.mask, p.segment, p.places, p.tail_begin);
  // Bounds grow with the token: the first row's begin and the last one's end contain all.
  const int64_t begin = problem.bounds(problem.token(0)).begin,
                end = problem.bounds(problem.token(problem.rows - 1)).end;
  const uint64_t keys = end > begin ? static_cast<uint64_t>(end - begin) : 0;
  problem.walk_key = begin;
  problem.walk = {};
  if (keys == 0) return;  // the capacity may be 0
  const uint64_t slot = abi::kv_slot(p.ring_start + static_cast<uint64_t>(begin), p.capacity);
  problem.walk = abi::kv_walk<uint64_t>(p.capacity, slot, keys, problem.layout.stage_keys);
}

inline void start_rows(const PrefillProblem& problem, const float* slopes) {
  Rows& state = problem.state();
  for (uint32_t r = threadIdx.x; r < kMostRows; r += blockDim.x) {
    const uint64_t token = problem.token(r < problem.rows ? r : 0);
    const abi::RowBounds<int64_t> b = problem.bounds(token);
    state.begin[r] = b.begin, state.end[r] = b.end;
    state.position[r] = abi::row_position(problem.mask, static_cast<int64_t>(token));
    state.state[r] = SoftmaxState::none();
    state.slope[r] = slopes == nullptr || r >= problem.rows ? 0.0f : slopes[problem.head(r)];
  }
}

}  // namespace gyre::cuda
