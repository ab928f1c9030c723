// bytes_copy: see abi/bytes_copy.h. y is the row.
#include "abi/bytes_copy.h"
#include "metal/kernels/kernel.h"

kernel void bytes_copy(constant gyre::abi::BytesCopyParams& p [[buffer(0)]],
                       const device uchar* from [[buffer(1)]], device uchar* to [[buffer(2)]],
                       GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const bool wide = grid.aligned(0) && grid.aligned(1) && ((p.from_stride | p.to_stride) & 15) == 0;
  copy_bytes(from + group.y * p.from_stride, to + group.y * p.to_stride, p.bytes, wide,
             ulong(group.x) * threads.x + index, ulong(groups.x) * threads.x);
}
