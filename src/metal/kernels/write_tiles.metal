// kv_quantize, kv_append and kv_write: see abi/write.h. z is the stream, y the head, x tiles, one
// to a simdgroup. Where tokens go to may be known on the device only: the grid is made for the most
// tiles, and simdgroups without one return at once.
#include "metal/kernels/write_job.h"

kernel void write_tiles(constant gyre::abi::WriteParams& p [[buffer(0)]],
                        const device uchar* where [[buffer(1)]],
                        const device uchar* k [[buffer(2)]], device uchar* k_codes [[buffer(3)]],
                        device uchar* k_scales [[buffer(4)]], device uchar* k_f16 [[buffer(5)]],
                        const device uchar* v [[buffer(6)]], device uchar* v_codes [[buffer(7)]],
                        device uchar* v_scales [[buffer(8)]], device uchar* v_f16 [[buffer(9)]],
                        GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint stream = p.first_stream + group.z, format = spec_byte(1 + stream);
  constant gyre::abi::WriteStream& s = p.stream[stream];
  const StoredStream to = {stream == 0 ? k : v, stream == 0 ? k_codes : v_codes,
                           stream == 0 ? k_scales : v_scales, stream == 0 ? k_f16 : v_f16,
                           grid.aligned(4 * stream + 2)};
  const TileJob job = write_job(p, stream, where, to,
                                ulong(group.x) * (threads.x / kLanes) + simdgroup, group.y, lane);
  const TileSource from = {to.source, spec_byte(0), (spec_byte(3) >> stream & 1u) != 0,
                           s.source_token_stride, group.y * s.source_head_stride};
  store_source(s.cache, format, job, from, shared + simdgroup * tile_bytes(p), lane);
}
