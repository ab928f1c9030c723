// rope and norm_rope: see abi/rope.h. x is the token, y items of heads, one to a simdgroup: those
// of x, then those of k.
#include "metal/kernels/rope_rows.h"

kernel void rope(constant gyre::abi::RopeParams& p [[buffer(0)]],
                 const device uchar* x [[buffer(1)]], const device uchar* positions [[buffer(2)]],
                 device uchar* out [[buffer(3)]], const device uchar* frequencies [[buffer(4)]],
                 const device uchar* factors [[buffer(5)]],
                 const device uchar* weight [[buffer(6)]], device uchar* second [[buffer(7)]],
                 const device uchar* k [[buffer(8)]], device uchar* k_out [[buffer(9)]],
                 const device uchar* k_weight [[buffer(10)]], device uchar* k_second [[buffer(11)]],
                 GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const RopeTables tables = {positions, frequencies, factors, grid.has(4)};
  const ulong item = ulong(group.y) * kRopeSimdgroups + simdgroup;
  const ulong items = rope_items(p, p.stream[0]);
  const bool adjacent = spec_byte(2) != 0, norm = spec_byte(3) != 0;
  if (item < items) {
    const RopeArgs args = {x, out, weight, second};
    rotate_item(p, p.stream[0], tables, args, group.x, item, spec_byte(0), spec_byte(1), adjacent,
                norm, lane);
  } else if (p.streams == 2) {
    const RopeArgs args = {k, k_out, k_weight, k_second};
    rotate_item(p, p.stream[1], tables, args, group.x, item - items, spec_byte(0), spec_byte(1),
                adjacent, norm, lane);
  }
}
