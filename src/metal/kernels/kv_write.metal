// kv_write: see abi/kv_write.h. z is the stream, y the head, x tokens, one to a simdgroup.
// Tokens that share a tile are one simdgroup's, that of the first of them in the list; the
// simdgroups of the others return at once.
#include "metal/kernels/slot_list.h"

kernel void kv_write(constant gyre::abi::KvWriteParams& p [[buffer(0)]],
                     const device uchar* k [[buffer(1)]], device uchar* k_codes [[buffer(2)]],
                     device uchar* k_scales [[buffer(3)]], const device uchar* v [[buffer(4)]],
                     device uchar* v_codes [[buffer(5)]], device uchar* v_scales [[buffer(6)]],
                     const device uchar* slots [[buffer(7)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint stream = group.z, format = spec_byte(1 + stream);
  const SlotList list = {slots, spec_byte(3), p.tokens, p.pages * p.page_tokens};
  constant gyre::abi::KvQuantizeStream& s = p.stream[stream];
  const PagePlaces places = {stream == 0 ? k_codes : v_codes, stream == 0 ? k_scales : v_scales,
                             grid.aligned(3 * stream + 1)};
  const TileJob job = write_job(p, s.cache, list, places,
                                ulong(group.x) * (threads.x / kLanes) + simdgroup, group.y, lane);
  const TileSource from = {stream == 0 ? k : v, spec_byte(0), (spec_byte(4) >> stream & 1u) != 0,
                           s.source_token_stride, group.y * s.source_head_stride};
  store_source(
      s.cache, format, job, from,
      shared + simdgroup * tile_bytes(p.stream[0].cache.head_dim, p.stream[1].cache.head_dim),
      lane);
}
