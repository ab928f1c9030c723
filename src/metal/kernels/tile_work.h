#pragma once
// How much the groups of the writers take: plain functions of params, for kernels and for those who
// launch them.
#include "abi/rope_append.h"

namespace gyre {
namespace metal {

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// A tile is a simdgroup's; its codes meet in the group's memory, of which a group takes up to half.
inline uint32_t tile_bytes(const GYRE_PARAMS abi::WriteParams& p) {
  const uint32_t k_dim = p.stream[0].cache.head_dim, v_dim = p.stream[1].cache.head_dim;
  return abi::kKvTile * (k_dim > v_dim ? k_dim : v_dim);
}
constexpr uint32_t tile_simdgroups(uint32_t bytes) { return bytes <= 4096 ? 4 : 2; }

// The most tiles of a head. Tokens of a step may be sink tokens, which no tile of the body takes:
// runs of 8 of them follow.
inline uint64_t write_tile_count(const GYRE_PARAMS abi::WriteParams& p) {
  if (p.where == abi::kWriteRange) return p.run.tiles;
  if (p.where == abi::kWriteSlots) return p.tokens;
  return abi::append_max_tiles(p) +
         divide_up(abi::kv_least(p.tokens, p.places.sink_tokens), abi::kKvTile);
}

}  // namespace metal
}  // namespace gyre
