#pragma once
// How rope_append's grid and memory are cut: plain functions of params, for the kernel and for
// those who launch it.
#include "metal/kernels/rope_work.h"
#include "metal/kernels/tile_work.h"

namespace gyre {
namespace metal {

inline uint32_t stored_dim(const GYRE_PARAMS abi::RopeAppendParams& p, uint32_t stream) {
  return p.slot_bytes != 0 ? p.write.stream[stream].cache.head_dim
                           : p.append.stream[stream].body.head_dim;
}
// A simdgroup's memory: a rotated row of K in f32, then the codes of a tile.
inline uint32_t rope_row_bytes(const GYRE_PARAMS abi::RopeAppendParams& p) {
  return (4 * stored_dim(p, 0) + 15) / 16 * 16;
}
inline uint32_t rope_append_bytes(const GYRE_PARAMS abi::RopeAppendParams& p) {
  return rope_row_bytes(p) + (tile_bytes(stored_dim(p, 0), stored_dim(p, 1)) + 15) / 16 * 16;
}
// Groups that the tiles of one head of K take, or of V.
inline uint64_t stored_groups(const GYRE_PARAMS abi::RopeAppendParams& p, uint32_t simdgroups) {
  const uint64_t tiles =
      p.slot_bytes != 0 ? p.write.tokens : append_most_tiles(p.append) + append_sink_runs(p.append);
  return divide_up(tiles, simdgroups);
}

}  // namespace metal
}  // namespace gyre
