#pragma once
// How much the groups of the writers take: plain functions of params, for kernels and for those who
// launch them.
#include "abi/kv_append.h"
#include "abi/kv_write.h"
#include "abi/rope_append.h"

namespace gyre {
namespace metal {

// A tile is a simdgroup's; its codes meet in the group's memory, of which a group takes up to half.
inline uint32_t tile_bytes(uint32_t k_dim, uint32_t v_dim) {
  return abi::kKvTile * (k_dim > v_dim ? k_dim : v_dim);
}
constexpr uint32_t tile_simdgroups(uint32_t bytes) { return bytes <= 4096 ? 4 : 2; }

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Where keys enter the body is known on the device only; these are the most tiles.
inline uint64_t append_most_tiles(const GYRE_PARAMS abi::KvAppendParams& p) {
  const uint64_t tiles = divide_up(p.tokens + 2 * abi::kKvTile - 1, abi::kKvTile);
  const uint64_t all = divide_up(p.places.body_capacity, abi::kKvTile);
  return tiles < all ? tiles : all;
}
// Tokens of a step may be sink tokens, which no tile of the body takes: runs of 8 of them.
inline uint64_t append_sink_runs(const GYRE_PARAMS abi::KvAppendParams& p) {
  const uint64_t most = p.tokens < p.places.sink_tokens ? p.tokens : p.places.sink_tokens;
  return divide_up(most, abi::kKvTile);
}

}  // namespace metal
}  // namespace gyre
