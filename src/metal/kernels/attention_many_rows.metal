// attention of many rows: a thread group is one KV head, one split of the keys and up to 32 of the
// head's (token, query head) rows, eight to a simdgroup. It walks the keys in stages, which all
// threads decode to the group's memory; each simdgroup multiplies with simdgroup matrices: its
// queries, which stay in registers, with K, then weights with V. Head dims are multiples of 8 up to
// 256.
#include "metal/kernels/attention_many_rows.h"

kernel void attention_many_rows(constant gyre::abi::AttentionParams& p [[buffer(0)]],
                                GYRE_ATTENTION_ARGUMENTS, GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const AttentionPointers pointers = GYRE_ATTENTION_POINTERS;
  const AttentionShape shape = {spec_byte(0), spec_byte(1),  spec_half(2),
                                spec_half(3), kManyRowsTile, p.table.page_tokens != 0};
  attend_many_rows(p, pointers, grid, shape);
}
