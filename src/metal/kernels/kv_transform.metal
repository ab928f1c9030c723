// kv_transform: see abi/kv_feedback.h. y is the matrix, x some of the rows that are multiplied with it.
// The rows lie in the group's memory; a thread has columns of the matrix.
#include "metal/kernels/encode_work.h"
#include "metal/kernels/row.h"

kernel void kv_transform(constant gyre::abi::KvTransformParams& p [[buffer(0)]],
                     const device uchar* x [[buffer(1)]], const device uchar* matrix [[buffer(2)]],
                     const device uchar* before [[buffer(3)]],
                     const device uchar* after [[buffer(4)]], device uchar* out [[buffer(5)]],
                     GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint n = p.head_dim;
  const ulong of = group.y, first = ulong(group.x) * kTransformRows, all = p.tokens * p.group;
  threadgroup float* const rows = reinterpret_cast<threadgroup float*>(shared);
  for (uint r = 0; r < kTransformRows; ++r) {
    const ulong row = first + r, head = row / p.tokens, token = row - head * p.tokens;
    const device uchar* const from =
        x + token * p.x_token_stride + (of * p.group + head) * p.x_head_stride;
    for (uint i = index; i < n; i += threads.x) {
      float value = row < all ? load_float(from, spec_byte(0), i) : 0.0f;
      if (grid.has(2)) value = value - pointer<float>(before)[of * n + i];
      rows[r * n + i] = value;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const device float* const of_head = pointer<float>(matrix) + of * n * n;
  for (uint i = index; i < n; i += threads.x) {
    float sums[kTransformRows];
    for (uint r = 0; r < kTransformRows; ++r) sums[r] = 0;
    for (uint j = 0; j < n; ++j) {
      const float element = of_head[ulong(j) * n + i];
      for (uint r = 0; r < kTransformRows; ++r) sums[r] = fma(element, rows[r * n + j], sums[r]);
    }
    for (uint r = 0; r < kTransformRows; ++r) {
      const ulong row = first + r, head = row / p.tokens, token = row - head * p.tokens;
      if (row >= all) break;
      if (grid.has(3)) sums[r] = sums[r] + pointer<float>(after)[of * n + i];
      store_float(out + token * p.out_token_stride + (of * p.group + head) * p.out_head_stride,
                  spec_byte(1), i, sums[r]);
    }
  }
}
