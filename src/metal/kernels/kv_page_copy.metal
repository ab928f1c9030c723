// kv_page_copy: see abi/bytes_copy.h. y is the pair, x parts of the page. Numbers of pages are
// device data and may be anything.
#include "abi/bytes_copy.h"
#include "metal/kernels/kernel.h"

kernel void kv_page_copy(constant gyre::abi::KvPageCopyParams& p [[buffer(0)]],
                         device uchar* pages [[buffer(1)]], const device uchar* from [[buffer(2)]],
                         const device uchar* to [[buffer(3)]], GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const bool wide = grid.aligned(0) && p.page_stride % 16 == 0;
  for (ulong pair = group.y; pair < p.count; pair += groups.y) {
    const int source = pointer<int>(from)[pair], target = pointer<int>(to)[pair];
    if (source < 0 || target < 0 || ulong(source) >= p.pages || ulong(target) >= p.pages) continue;
    copy_bytes(pages + ulong(source) * p.page_stride, pages + ulong(target) * p.page_stride,
               p.page_bytes, wide, ulong(group.x) * threads.x + index, ulong(groups.x) * threads.x);
  }
}
