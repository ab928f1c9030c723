// rope_append: see abi/rope_append.h. Groups take tiles of K, then tiles of V, one to a simdgroup,
// then items of q as rope does. A row of K is rotated into the group's memory, in the dtype that
// rope would leave it in, and then stored as any other is.
#include "metal/kernels/rope_append_work.h"
#include "metal/kernels/rope_rows.h"
#include "metal/kernels/write_job.h"

namespace gyre {
namespace metal {

inline float rounded_to(uint dtype, float value) {
  if (dtype == kF32) return value;
  return dtype == kF16 ? half_to_float(float_to_half(value))
                       : bfloat_to_float(float_to_bfloat(value));
}

struct SharedRopeOut {
  threadgroup float* row;
  uint dtype;

  void put(uint /*row*/, uint coordinate, float value) const {
    row[coordinate] = rounded_to(dtype, value);
  }
  void pass(uint /*row*/, uint coordinate, const thread TensorRow& from) const {
    row[coordinate] = from.get(coordinate);
  }
};

// Rows of K. A lane knows token and place of slot lane % 8.
struct RotatedRows {
  constant abi::RopeParams* p;
  RopeTables tables;
  RopeHeads heads;  // x: of token 0
  ulong offset, token;
  bool adjacent, norm;
  threadgroup float* row;
  uint lane;

  void begin(uint slot) {
    RopeHeads one = heads;
    one.x = heads.x + shuffle_ulong(offset, slot);
    const SharedRopeOut out = {row, heads.dtype};
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the row before has been read
    rotate_heads(*p, tables, shuffle_ulong(token, slot), one, adjacent, norm, out, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  float get(uint coordinate) const { return row[coordinate]; }
  void copy(uint coordinate, device uchar* to, uint dtype) const {
    store_float(to, dtype, coordinate, row[coordinate]);
  }
};

inline void store_stream(constant abi::RopeAppendParams& p, const thread RopeTables& tables,
                         const device uchar* k_weight, const thread StoredStream& to,
                         const device uchar* where, uint stream, ulong number, uint head,
                         threadgroup uchar* memory, uint lane) {
  const uint dtype = spec_byte(0), format = spec_byte(1 + stream);
  constant abi::WriteStream& s = p.write.stream[stream];
  const TileJob job = write_job(p.write, stream, where, to, number, head, lane);
  threadgroup uchar* const codes = memory + rope_row_bytes(p);
  if (stream == 1) {
    const TileSource from = {to.source, dtype, false, s.source_token_stride,
                             head * s.source_head_stride};
    store_source(s.cache, format, job, from, codes, lane);
    return;
  }
  RotatedRows rows = {&p.rope,
                      tables,
                      {to.source, 0, 1, dtype, k_weight, p.rope.stream[1].weight_dtype},
                      job.token * s.source_token_stride + head * s.source_head_stride,
                      job.token,
                      spec_byte(3) != 0,
                      spec_byte(4) != 0,
                      reinterpret_cast<threadgroup float*>(memory),
                      lane};
  store_tile(s.cache, format, job, rows, codes, lane);
}

}  // namespace metal
}  // namespace gyre

kernel void rope_append(
    constant gyre::abi::RopeAppendParams& p [[buffer(0)]], const device uchar* q [[buffer(1)]],
    const device uchar* positions [[buffer(2)]], device uchar* q_out [[buffer(3)]],
    const device uchar* frequencies [[buffer(4)]], const device uchar* factors [[buffer(5)]],
    const device uchar* q_weight [[buffer(6)]], const device uchar* k_weight [[buffer(7)]],
    const device uchar* where [[buffer(8)]], const device uchar* k [[buffer(9)]],
    device uchar* k_codes [[buffer(10)]], device uchar* k_scales [[buffer(11)]],
    device uchar* k_f16 [[buffer(12)]], const device uchar* v [[buffer(13)]],
    device uchar* v_codes [[buffer(14)]], device uchar* v_scales [[buffer(15)]],
    device uchar* v_f16 [[buffer(16)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const RopeTables tables = {positions, frequencies, factors, grid.has(4)};
  const uint simdgroups = threads.x / kLanes, heads = static_cast<uint>(p.rope.stream[1].heads);
  const uint tile_groups = heads * static_cast<uint>(stored_groups(p, simdgroups));
  if (group.x < 2 * tile_groups) {
    const uint stream = group.x < tile_groups ? 0 : 1;
    const uint number = group.x - stream * tile_groups, of_head = number / heads;
    const StoredStream to = {stream == 0 ? k : v, stream == 0 ? k_codes : v_codes,
                             stream == 0 ? k_scales : v_scales, stream == 0 ? k_f16 : v_f16,
                             grid.aligned(9 + 4 * stream)};
    store_stream(p, tables, k_weight, to, where, stream, ulong(of_head) * simdgroups + simdgroup,
                 number - of_head * heads, shared + simdgroup * rope_append_bytes(p), lane);
  } else {
    const uint number = group.x - 2 * tile_groups;
    const uint q_groups =
        static_cast<uint>(divide_up(rope_items(p.rope, p.rope.stream[0]), simdgroups));
    const uint token = number / q_groups,
               item = (number - token * q_groups) * simdgroups + simdgroup;
    const RopeArgs args = {q, q_out, q_weight, q_out};
    rotate_item(p.rope, p.rope.stream[0], tables, args, token, item, spec_byte(0), spec_byte(0),
                spec_byte(3) != 0, spec_byte(4) != 0, lane);
  }
}
