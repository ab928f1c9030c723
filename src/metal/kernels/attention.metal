// attention of any shape, see attention_rows.h. Head dims are known when it runs.
#include "metal/kernels/attention_rows.h"

kernel void attention(constant gyre::abi::AttentionParams& p [[buffer(0)]],
                      GYRE_ATTENTION_ARGUMENTS, GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const AttentionPointers pointers = GYRE_ATTENTION_POINTERS;
  const AttentionShape shape = {spec_byte(2),
                                spec_byte(3),
                                p.k.head_dim,
                                p.v.head_dim,
                                attention_tile_rows(p.k.head_dim, p.v.head_dim),
                                spec_byte(4) != 0};
  attend_rows(p, pointers, grid, shape);
}
