#include "plan.h"

#include <algorithm>

namespace gyre::ggml {
namespace {

constexpr uint64_t kItems = 64;         // enough for any number of cores that memory can feed
constexpr uint64_t kChunkKeys = 512;    // fewer are not worth a partial state
constexpr uint64_t kMaxPartials = 256;  // chunks of all rows of tiles: bounds the merge

uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace

Plan::Plan(const Problem& p) {
  // As many rows as leave enough items.
  const uint64_t rows = p.tokens * p.group();
  while (item_rows > kTileRows && p.streams * p.kv_heads() * divide_up(rows, item_rows) < kItems)
    item_rows /= 2;
  tiles = divide_up(rows, item_rows);
  const uint64_t row_tiles = p.streams * p.kv_heads() * tiles;
  chunks = divide_up(p.cells, kChunkKeys);
  if (tiles == 1) {
    chunks = std::min({chunks, kItems, std::max<uint64_t>(kMaxPartials / row_tiles, 1)});
  } else {
    chunks = std::min(chunks, divide_up(kItems, row_tiles));
  }
  chunk_keys = divide_up(divide_up(p.cells, chunks), kBlockKeys) * kBlockKeys;
  chunks = divide_up(p.cells, chunk_keys);
  item_heads = 1;
  if (tiles == 1) item_heads = std::clamp<uint64_t>(row_tiles * chunks / kItems, 1, p.kv_heads());
  head_groups = divide_up(p.kv_heads(), item_heads);
  items = p.streams * head_groups * tiles * chunks;
}

Item Plan::item(const Problem& p, uint64_t index) const {
  Item item{};
  item.chunk = index % chunks;
  index /= chunks;
  // The last tokens first: they see the most cells of a causal mask.
  const uint64_t tile = tiles - 1 - index % tiles;
  index /= tiles;
  item.head_begin = index % head_groups * item_heads;
  item.head_end = std::min(item.head_begin + item_heads, p.kv_heads());
  item.stream = index / head_groups;
  item.row_begin = tile * item_rows;
  item.row_end = std::min(item.row_begin + item_rows, p.tokens * p.group());
  item.key_begin = item.chunk * chunk_keys;
  item.key_end = std::min(item.key_begin + chunk_keys, p.cells);
  return item;
}

uint64_t Plan::scratch_floats(const Problem& p) const {
  const uint64_t rows = std::min<uint64_t>(p.tokens * p.group(), item_rows);
  const uint64_t dk = padded(p.k_dim), dv = padded(p.v_dim);
  // Queries, sums and states of all heads of an item, queries transposed or packed, blocks of K and
  // V, those packed, logits, a row of them.
  return item_heads * rows * (dk + dv + 2) +
         item_heads * divide_up(rows, kTileRows) * query_tile_floats(dk) +
         kBlockKeys * (block_stride(p.k_dim) + block_stride(p.v_dim)) + matrix_floats(dk) +
         matrix_floats(dv) + uint64_t{kTileRows + 1} * kBlockKeys;
}

uint64_t Plan::partial_floats(const Problem& p) const {
  return chunks == 1 ? 0 : p.streams * p.heads * p.tokens * chunks * (p.v_dim + 2);
}

}  // namespace gyre::ggml
