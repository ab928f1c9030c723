// kv_quantize: see abi/kv_quantize.h. z is the stream, y the head, x tiles, one to a simdgroup.
#include "abi/kv_quantize.h"
#include "metal/kernels/tile.h"
#include "metal/kernels/tile_work.h"

kernel void kv_quantize(constant gyre::abi::KvQuantizeParams& p [[buffer(0)]],
                        const device uchar* k [[buffer(1)]], device uchar* k_codes [[buffer(2)]],
                        device uchar* k_scales [[buffer(3)]], const device uchar* v [[buffer(4)]],
                        device uchar* v_codes [[buffer(5)]], device uchar* v_scales [[buffer(6)]],
                        GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint stream = p.first_stream + group.z, format = spec_byte(1 + stream);
  const ulong number = ulong(group.x) * (threads.x / kLanes) + simdgroup;
  if (number >= p.tiles) return;
  constant gyre::abi::KvQuantizeStream& s = p.stream[stream];
  constant gyre::abi::KvCacheLayout& cache = s.cache;
  const ulong at = p.first_tile + number, tile = at < p.all_tiles ? at : at - p.all_tiles;
  // Which token enters slot lane % 8.
  const ulong slot = tile * gyre::abi::kKvTile + lane % gyre::abi::kKvTile;
  const ulong token = slot >= p.first_slot ? slot - p.first_slot : slot + p.capacity - p.first_slot;
  const uint tokens = slot_mask(slot < p.capacity && token < p.tokens, lane);
  const TileJob job = {tokens,
                       token,
                       {(stream == 0 ? k_codes : v_codes) + group.y * cache.codes_head_stride +
                            tile * cache.codes_tile_stride,
                        (stream == 0 ? k_scales : v_scales) + group.y * cache.scales_head_stride +
                            tile * cache.scales_tile_stride,
                        is_wide_cache(cache, grid.aligned(3 * stream + 1))},
                       {nullptr, gyre::abi::kNoNear},
                       true};
  const TileSource from = {stream == 0 ? k : v, spec_byte(0), (spec_byte(3) >> stream & 1u) != 0,
                           s.source_token_stride, group.y * s.source_head_stride};
  store_source(
      cache, format, job, from,
      shared + simdgroup * tile_bytes(p.stream[0].cache.head_dim, p.stream[1].cache.head_dim),
      lane);
}
