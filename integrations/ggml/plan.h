#pragma once
// How a problem is cut into work items. The cut follows from the shapes alone, so that sums do not
// depend on the number of threads.

#include <algorithm>
#include <cstdint>

#include "isa/matrix.h"
#include "problem.h"

namespace gyre::ggml {

constexpr uint32_t kTileRows = 64;      // rows of queries that are multiplied at a time
constexpr uint32_t kMaxItemRows = 256;  // rows that share a pass over K and V
constexpr uint32_t kBlockKeys = 64;     // cells that are unpacked at a time

// Rows of queries of one KV head are numbered token by token: row = token * group + head in group.
// An item is up to 256 of them, of some neighbouring KV heads (cells keep the rows of all heads
// side by side), over a chunk of the cells.
struct Item {
  uint64_t stream, chunk;
  uint64_t head_begin, head_end;  // KV heads
  uint64_t row_begin, row_end;
  uint64_t key_begin, key_end;
};

struct Plan {
  uint64_t item_rows = kMaxItemRows;  // at most, a multiple of kTileRows
  uint64_t tiles = 0;                 // items over the rows of a KV head
  uint64_t item_heads = 0;            // KV heads of an item
  uint64_t head_groups = 0;
  uint64_t chunks = 0, chunk_keys = 0;
  uint64_t items = 0;

  explicit Plan(const Problem& problem);
  Item item(const Problem& problem, uint64_t index) const;

  // What a thread needs: floats, 64-byte aligned.
  uint64_t scratch_floats(const Problem& problem) const;
  // What chunks leave for the merge: [row of all queries][chunk][max, sum, v_dim values].
  uint64_t partial_floats(const Problem& problem) const;
};

// Values of a row in scratch, padded to whole vectors of 16.
constexpr uint64_t padded(uint64_t values) { return (values + 15) / 16 * 16; }
// Floats from row to row of a block, and from column to column of transposed queries: an odd number
// of cache lines, or few sets of the first-level cache would hold them all.
constexpr uint64_t block_stride(uint64_t values) {
  return padded(values) / 16 % 2 == 0 ? padded(values) + 16 : padded(values);
}
constexpr uint32_t kColumnStride = kTileRows + 16;
// Queries of kTileRows rows, transposed or packed.
constexpr uint64_t query_tile_floats(uint64_t padded_dim) {
  return std::max(padded_dim * kColumnStride, matrix_floats(padded_dim));
}

}  // namespace gyre::ggml
