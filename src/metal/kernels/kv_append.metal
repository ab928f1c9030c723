// kv_append: see abi/kv_append.h. z is the stream, y the head, x tiles of the body, one to a
// simdgroup, then runs of sink tokens. The grid is made for the most tiles that a step can enter;
// simdgroups without one return at once.
#include "metal/kernels/append.h"

kernel void kv_append(constant gyre::abi::KvAppendParams& p [[buffer(0)]],
                      const device uchar* state [[buffer(1)]], const device uchar* k [[buffer(2)]],
                      device uchar* k_codes [[buffer(3)]], device uchar* k_scales [[buffer(4)]],
                      device uchar* k_near [[buffer(5)]], const device uchar* v [[buffer(6)]],
                      device uchar* v_codes [[buffer(7)]], device uchar* v_scales [[buffer(8)]],
                      device uchar* v_near [[buffer(9)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint stream = group.z, format = spec_byte(1 + stream);
  constant gyre::abi::KvAppendStream& s = p.stream[stream];
  const AppendPlaces places = {stream == 0 ? k_codes : v_codes, stream == 0 ? k_scales : v_scales,
                               stream == 0 ? k_near : v_near, grid.aligned(4 * stream + 2)};
  const TileJob job = append_job(p, s, load_state(state), places,
                                 ulong(group.x) * (threads.x / kLanes) + simdgroup, group.y, lane);
  const TileSource from = {stream == 0 ? k : v, spec_byte(0), (spec_byte(3) >> stream & 1u) != 0,
                           s.source_token_stride, group.y * s.source_head_stride};
  store_source(
      s.body, format, job, from,
      shared + simdgroup * tile_bytes(p.stream[0].body.head_dim, p.stream[1].body.head_dim), lane);
}
