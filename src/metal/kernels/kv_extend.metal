// kv_extend: see abi/kv_extend.h. A thread a position.
#include "abi/kv_extend.h"
#include "metal/kernels/kernel.h"

kernel void kv_extend(constant gyre::abi::KvExtendParams& p [[buffer(0)]],
                      device uchar* state [[buffer(1)]], device uchar* positions [[buffer(2)]],
                      GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const ulong i = ulong(group.x) * threads.x + index;
  if (i == 0) {
    device ulong* const fields = pointer<ulong>(state);
    fields[0] = p.state.start;
    fields[1] = p.state.length;
    fields[2] = p.state.tail_begin;
  }
  if (i < p.positions) pointer<int>(positions)[i] = static_cast<int>(p.state.start + i);
}
