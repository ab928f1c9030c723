#pragma once
// Decoding over pages: splits of a sequence's keys leave their states in the argument `partial`,
// and the same kernel, run again, merges them. What a row comes to does not depend on where its
// states were: one split that is merged has the bits of one that was written at once.
#include "metal/kernels/attention_row.h"

namespace gyre {
namespace metal {

// Whether the group has only to say that its split has no keys. A sequence that makes no sense has
// none: its first split says so.
inline bool leave_empty_split(const thread RowTile& tile, constant abi::AttentionParams& p,
                              const thread AttentionPointers& at, uint v_dim,
                              const thread Grid& grid) {
  if (tile.entries == nullptr || p.partial != abi::kAttentionPartial || tile.walk.tiles != 0)
    return false;
  for (uint r = grid.index; r < tile.rows; r += grid.threads) {
    device float* const to = split_state(tile, at, tile.split, r, v_dim);
    to[v_dim] = minus_infinity();
    to[v_dim + 1] = tile.invalid ? as_type<float>(0x7FC00000u) : 0.0f;
  }
  return true;
}

// Whether the command merges. Rows of the group, a simdgroup each, from the oldest split on.
inline bool merge_splits(const thread RowTile& tile, constant abi::AttentionParams& p,
                         const thread AttentionPointers& at, uint rows, uint v_dim,
                         const thread Grid& grid) {
  if (tile.entries == nullptr || !grid.has(abi::arg_partial) || p.partial == abi::kAttentionPartial)
    return false;
  threadgroup float* const x = reinterpret_cast<threadgroup float*>(grid.shared);
  const ulong stride = tile.states * (v_dim + 2);
  for (uint r = grid.simdgroup; r < tile.rows; r += kAttentionSimdgroups) {
    const device float* const first = split_state(tile, at, 0, r, v_dim);
    const device float* const notes = first + v_dim;
    SoftmaxState state = {minus_infinity(), 0};
    for (ulong s = 0; s < p.splits; ++s) {
      if (notes[s * stride + 1] != 0) state.max_logit = max(state.max_logit, notes[s * stride]);
    }
    const float reference = reference_of(state.max_logit);
    for (uint c = grid.lane; c < v_dim; c += kLanes) x[c * rows + r] = 0;
    bool any = false;
    for (ulong s = 0; s < p.splits; ++s) {
      const float sum = notes[s * stride + 1];
      if (sum == 0) continue;
      const float factor = exp2_of(notes[s * stride] - reference);
      state.sum = any ? fma(sum, factor, state.sum) : sum * factor;
      for (uint c = grid.lane; c < v_dim; c += kLanes) {
        const float part = first[s * stride + c] * factor;
        x[c * rows + r] = any ? x[c * rows + r] + part : part;
      }
      any = true;
    }
    write_row(x + r, rows, r, state, 1.0f, tile, p, at, v_dim, grid);
  }
  return true;
}

}  // namespace metal
}  // namespace gyre
