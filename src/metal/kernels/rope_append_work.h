#pragma once
// How rope_append's grid and memory are cut: plain functions of params, for the kernel and for
// those who launch it.
#include "metal/kernels/rope_work.h"
#include "metal/kernels/tile_work.h"

namespace gyre {
namespace metal {

// A simdgroup's memory: a rotated row of K in f32, then the codes of a tile.
inline uint32_t rope_row_bytes(const GYRE_PARAMS abi::RopeAppendParams& p) {
  return (4 * p.write.stream[0].cache.head_dim + 15) / 16 * 16;
}
inline uint32_t rope_append_bytes(const GYRE_PARAMS abi::RopeAppendParams& p) {
  return rope_row_bytes(p) + (tile_bytes(p.write) + 15) / 16 * 16;
}
// Groups that the tiles of one head of K take, or of V.
inline uint64_t stored_groups(const GYRE_PARAMS abi::RopeAppendParams& p, uint32_t simdgroups) {
  return divide_up(write_tile_count(p.write), simdgroups);
}

}  // namespace metal
}  // namespace gyre
