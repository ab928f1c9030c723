// kv_copy: see abi/kv_copy.h. z is the stream, y a head and every groups.y-th, x some tokens. Threads stand side by
// side in a row; a group has as many rows as fit.
#include "abi/kv_copy.h"
#include "metal/kernels/kernel.h"

kernel void kv_copy(constant gyre::abi::KvCopyParams& p [[buffer(0)]],
                    const device uchar* k [[buffer(1)]], device uchar* k_cache [[buffer(2)]],
                    const device uchar* v [[buffer(3)]], device uchar* v_cache [[buffer(4)]],
                    GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  constant gyre::abi::KvCopyStream& s = p.stream[group.z];
  const uint source_dtype = spec_byte(0), cache_dtype = spec_byte(1);
  const uint source_bytes = float_bytes(source_dtype);
  const bool wide =
      source_dtype == cache_dtype && grid.aligned(2 * group.z) && grid.aligned(2 * group.z + 1) &&
      ((s.source_token_stride | s.source_head_stride | s.cache_slot_stride | s.cache_head_stride) &
       15) == 0;
  const ulong parts = wide ? (s.row_elements * source_bytes + 15) / 16 : s.row_elements;
  if (parts == 0) return;
  const uint row_threads = parts < threads.x ? static_cast<uint>(parts) : threads.x;
  const uint rows = threads.x / row_threads, row = index / row_threads;
  if (row >= rows) return;
  const uint first = index - row * row_threads;
  const ulong step = ulong(groups.x) * rows;
  for (ulong head = group.y; head < p.heads; head += groups.y) {
    const device uchar* const from = (group.z == 0 ? k : v) + head * s.source_head_stride;
    device uchar* const to = (group.z == 0 ? k_cache : v_cache) + head * s.cache_head_stride;
    for (ulong token = ulong(group.x) * rows + row; token < p.tokens; token += step) {
      const device uchar* const source = from + token * s.source_token_stride;
      device uchar* const target = to + gyre::abi::kv_copy_slot(p, token) * s.cache_slot_stride;
      if (source_dtype == cache_dtype) {  // the bits as they are, a NaN's too
        if (wide) {
          copy_bytes(source, target, s.row_elements * source_bytes, true, first, row_threads);
        } else if (source_bytes == 2) {
          for (ulong i = first; i < s.row_elements; i += row_threads)
            pointer<ushort>(target)[i] = pointer<ushort>(source)[i];
        } else {
          for (ulong i = first; i < s.row_elements; i += row_threads)
            pointer<uint>(target)[i] = pointer<uint>(source)[i];
        }
      } else {
        for (ulong i = first; i < s.row_elements; i += row_threads)
          store_float(target, cache_dtype, i, load_float(source, source_dtype, i));
      }
    }
  }
}
