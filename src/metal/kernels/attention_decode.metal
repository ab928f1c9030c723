// attention of few rows, see attention_rows.h. The compiler knows head dims and rows and keeps sums
// in registers.
#include "metal/kernels/attention_rows.h"

kernel void attention_decode(constant gyre::abi::AttentionParams& p [[buffer(0)]],
                             GYRE_ATTENTION_ARGUMENTS, GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const AttentionPointers pointers = GYRE_ATTENTION_POINTERS;
  const uint k_dim = spec_half(3), v_dim = spec_byte(5) != 0 ? spec_byte(5) * 16 : k_dim;
  const AttentionShape shape = {spec_byte(0), spec_byte(1), k_dim,
                                v_dim,        spec_byte(2), spec_byte(4) != 0};
  attend_rows(p, pointers, grid, shape);
}
