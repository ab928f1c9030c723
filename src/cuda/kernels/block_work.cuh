#pragma once
// How much work a block takes: plain functions of params, for kernels and for those who launch
// them.
#include "abi/bytes_copy.h"
#include "abi/rope_append.h"

namespace gyre::cuda {

constexpr uint32_t kRoleV = 1;  // KvRole::v
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kBlockThreads = 256;
constexpr uint32_t kChunk = 8;      // coordinates that lie together in a lane
constexpr uint32_t kFewSlots = 2;   // chunks a lane holds: up to 512 coordinates a row
constexpr uint32_t kManySlots = 4;  // up to 1024

// Lanes that work a row, `slots` chunks each.
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
// A warp takes a tile of rows of 128 coordinates alone if addresses allow it; if not, the block
// goes round more often.
constexpr uint32_t kWarpDim = 128, kBlockWarps = kBlockThreads / 32;
constexpr uint32_t tiles_at_once(uint32_t head_dim) {
  return rows_per_block(head_dim) / abi::kKvTile;
}
constexpr uint32_t tiles_per_block(uint32_t head_dim) {
  return head_dim == kWarpDim ? kBlockWarps : tiles_at_once(head_dim);
}

// Floats that a thread keeps in shared memory for each slot of a row that takes many.
constexpr uint32_t kLongFloats = kChunk + 1;
constexpr uint32_t long_row_bytes(uint32_t head_dim) {
  return takes_many_slots(head_dim) ? kBlockThreads * kManySlots * kLongFloats * 4 : 0;
}

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// kv_copy. Both sides of a chunk are whole 16-byte words; a thread has chunks of several tokens in
// flight, 64 bytes of the source.
constexpr uint32_t copy_chunk(uint32_t source_bytes, uint32_t cache_bytes) {
  return 16 / (source_bytes < cache_bytes ? source_bytes : cache_bytes);
}
constexpr uint32_t copy_tokens(uint32_t source_bytes, uint32_t cache_bytes) {
  return 64 / (copy_chunk(source_bytes, cache_bytes) * source_bytes);
}

// A write in tiles. A range knows its tiles; where a state or a list goes is known on the device
// only: these are the most, for a list one to every token.
inline uint32_t write_tile_count(uint32_t where, const abi::WriteParams& p) {
  if (where == abi::kWriteRange) return static_cast<uint32_t>(p.run.tiles);
  return static_cast<uint32_t>(where == abi::kWriteState ? abi::append_max_tiles(p) : p.tokens);
}
constexpr uint32_t write_blocks(const abi::WriteParams& p, uint32_t stream, uint32_t tiles) {
  const uint32_t dim = p.stream[stream].cache.head_dim;
  const uint32_t all = static_cast<uint32_t>(p.heads) * tiles;
  if (dim == kWarpDim) return (all + kBlockWarps - 1) / kBlockWarps;  // no division
  return (all + tiles_per_block(dim) - 1) / tiles_per_block(dim);
}
// Rows for sink tokens and tail.
constexpr uint32_t kF16Lanes = 16;
constexpr uint64_t append_f16_blocks(const abi::WriteParams& p) {
  if (p.places.sink_tokens == 0 && p.places.tail_capacity == 0) return 0;
  return divide_up(2 * p.heads * p.tokens, kBlockThreads / kF16Lanes);
}
// Few tokens of kv_write: a warp to each row of K, then of V.
constexpr uint32_t kWriteRows = 4;  // of a block
constexpr uint64_t write_row_blocks(const abi::WriteParams& p) {
  return divide_up(2 * p.heads * p.tokens, kWriteRows);
}
// kv_page_copy. Blocks take this many bytes of a page at a time.
constexpr uint32_t kPageCopyBytes = 4 * kBlockThreads * 16;
constexpr uint64_t page_copy_parts(const abi::KvPageCopyParams& p) {
  return divide_up(p.page_bytes, kPageCopyBytes);
}

// rope. A item is one or two heads of one token, by the same lanes: two where tokens are many. A
// block takes some whole tokens or a part of one; their angles lie in shared memory.
constexpr uint32_t kRopeRows = 2;
constexpr uint64_t kRopeManyTokens = 256;
constexpr uint32_t rope_run(uint32_t element_bytes) { return 16 / element_bytes; }  // pairs at once
constexpr uint32_t rope_lane_bits(uint64_t head_dim, uint32_t element_bytes) {
  const uint32_t runs = (static_cast<uint32_t>(head_dim) - 1) / (2 * rope_run(element_bytes));
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 5; ++i) bits += runs >> i != 0 ? 1 : 0;
  return bits;
}
constexpr uint32_t rope_pairs(const abi::RopeParams& p) {
  return static_cast<uint32_t>(p.blocks) * static_cast<uint32_t>(p.block_pairs);
}
struct RopeWork {
  uint32_t items;          // of a block
  uint32_t rows;           // of a item, at most
  uint32_t first, groups;  // items of a token: of the first stream, of both
  uint32_t inverse;        // items * inverse >> 16 is items / groups, if a block takes whole tokens
  uint32_t tokens;         // of a block

  constexpr RopeWork(const abi::RopeParams& p, uint32_t lane_bits)
      : items(kBlockThreads >> lane_bits), rows(p.tokens < kRopeManyTokens ? 1 : kRopeRows) {
    const auto heads = static_cast<uint32_t>(p.stream[0].heads);
    const auto second = p.streams == 2 ? static_cast<uint32_t>(p.stream[1].heads) : 0;
    first = rows == 1 ? heads : (heads + 1) / 2;
    groups = first + (rows == 1 ? second : (second + 1) / 2);
    inverse = 65535u / (groups != 0 ? groups : 1) + 1;
    tokens = groups >= items ? 1 : items * inverse >> 16;
  }
};
static_assert(kRopeRows == 2);
// Floats of a token's cosines, and of its sines.
constexpr uint32_t rope_angle_floats(uint32_t pairs) { return (pairs + 7) / 8 * 8; }
constexpr uint32_t rope_shared_bytes(const abi::RopeParams& p, const RopeWork& work) {
  return static_cast<uint32_t>(work.tokens * 2 * rope_angle_floats(rope_pairs(p)) * sizeof(float));
}

// rope_append. Blocks take rows of K, then of V, a warp to each, then parts of q as rope does.
constexpr uint32_t kStoredRows = kBlockThreads / 32;  // of a block
struct RopeAppendBlocks {
  uint32_t rows;  // of K, and as many of V
  uint32_t q_x, q_y;

  constexpr RopeAppendBlocks(const abi::RopeAppendParams& p, uint32_t element_bytes)
      : q_x(0), q_y(0) {
    const auto tokens = static_cast<uint32_t>(p.rope.tokens);
    rows = (static_cast<uint32_t>(p.rope.stream[1].heads) * tokens + kStoredRows - 1) / kStoredRows;
    if (p.rope.streams == 0) return;
    const RopeWork work(p.rope, rope_lane_bits(p.rope.head_dim, element_bytes));
    q_x = (tokens + work.tokens - 1) / work.tokens;
    q_y = (work.groups + work.items - 1) / work.items;
  }
};
// Rotated rows of K in shared memory, bytes apart.
constexpr uint32_t staged_stride(uint64_t head_dim, uint32_t element_bytes) {
  return static_cast<uint32_t>((head_dim * element_bytes + 15) / 16 * 16);
}

}  // namespace gyre::cuda
