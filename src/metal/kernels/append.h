#pragma once
// Where the keys of a step go in a cache whose state is in device memory.
#include "abi/kv_append.h"
#include "metal/kernels/cache_state.h"
#include "metal/kernels/tile.h"
#include "metal/kernels/tile_work.h"

namespace gyre {
namespace metal {

// Where a stream's rows go: codes, scales, sink tokens and tail.
struct AppendPlaces {
  device uchar* codes;
  device uchar* scales;
  device uchar* near;
  bool aligned;  // codes
};

// A simdgroup's work: a tile of the body, or behind these 8 tokens for the sink tokens.
inline TileJob append_job(constant abi::KvAppendParams& p, constant abi::KvAppendStream& s,
                          abi::KvState state, const thread AppendPlaces& to, ulong number,
                          uint head, uint lane) {
  const abi::KvKeys keys = abi::append_keys(p, state);
  const ulong most = append_most_tiles(p), nth = lane % abi::kKvTile;
  const bool is_body = number < most;
  ulong tile = 0, key = 0;
  bool present = false;
  if (is_body) {
    const abi::AppendRun run = abi::append_run(p, state);
    if (number < run.tiles) {
      tile = run.tile(number);
      const ulong slot = tile * abi::kKvTile + nth;
      key = run.key_of(slot, p.places.body_capacity);
      present = slot < p.places.body_capacity && key < run.end_key;
    }
  } else {
    key = keys.begin + (number - most) * abi::kKvTile + nth;
    present = key < p.places.sink_tokens && key < keys.end;
  }
  return {slot_mask(present, lane),
          key - keys.begin,
          {to.codes + head * s.body.codes_head_stride + tile * s.body.codes_tile_stride,
           to.scales + head * s.body.scales_head_stride + tile * s.body.scales_tile_stride,
           is_wide_cache(s.body, to.aligned)},
          {to.near, abi::append_near_offset(p.places, s, key, head)},
          is_body};
}

}  // namespace metal
}  // namespace gyre
