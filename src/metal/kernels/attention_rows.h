#pragma once
// out = softmax(scale q k^T, capped, biased, masked) v, or the partial state of a split, for few
// rows at a time: a thread group is one KV head, one split of the keys and up to 8 of the head's
// (token, query head) rows. Each simdgroup walks every fourth block of 32 keys by itself: a lane
// scores a key, then has some coordinates of V, so that nothing is added up across lanes until the
// end. Bytes read: the split's K and V once for each such tile of rows, and the queries. A decoded
// token has one tile where a KV head has no more query heads than attention_tile_rows.
#include "metal/kernels/attention_splits.h"
#include "metal/kernels/attention_values.h"

namespace gyre {
namespace metal {

struct RowsWorker {
  RowTile tile;
  AttentionShape shape;
  AttentionLayout layout;
  StoredSide k, v;
  uint v_blocks;
};

// The online softmax over a block of keys, a lane each.
struct LaneSoftmax {
  float max_logit[kMaxTileRows];  // of the simdgroup
  float sum[kMaxTileRows];        // of the lane's keys
};

// One block of keys: scores, then weights to the group's memory, then values. `invalid` is set
// where an entry is no page.
inline void attend_block(const thread RowsWorker& w, constant abi::AttentionParams& p,
                         const thread AttentionPointers& at, const thread Grid& grid, ulong block,
                         const threadgroup float* q, thread LaneSoftmax& softmax,
                         thread LaneSums& sums, thread bool& invalid) {
  const uint rows = w.shape.rows;
  const threadgroup RowNotes* const notes =
      reinterpret_cast<const threadgroup RowNotes*>(grid.shared + w.layout.notes);
  threadgroup float* const weights =
      reinterpret_cast<threadgroup float*>(grid.shared + w.layout.weights) +
      grid.simdgroup * kBlockKeys * rows;
  threadgroup float* const scales =
      reinterpret_cast<threadgroup float*>(grid.shared + w.layout.scales) +
      grid.simdgroup * kBlockKeys * w.v_blocks;
  const ulong position = block * kBlockKeys + grid.lane;
  const uint slot = grid.lane % abi::kKvTile;
  const bool held = w.tile.holds_key(position);
  const long key = held ? w.tile.key_of(position) : 0;
  const device uchar* const tree_mask = grid.has(abi::arg_tree_mask) ? at.tree_mask : nullptr;
  uint seen = 0;
  for (uint r = 0; r < w.tile.rows; ++r) {
    if (held && sees(notes[r], w.tile, key, tree_mask, p.tree_stride)) seen |= 1u << r;
  }
  float score[kMaxTileRows];
  GYRE_UNROLL
  for (uint r = 0; r < rows; ++r) score[r] = 0;
  if (seen != 0) {
    const TileAt here = tile_at(w.tile, p.table, w.shape.paged, position / abi::kKvTile, invalid);
    score_key(w.k, here, slot, q, rows, score);
    const device uchar* const of_tile =
        w.v.scales + here.offset + here.tile * w.v.scales_tile_stride;
    for (uint b = 0; b < w.v_blocks; ++b)
      scales[grid.lane * w.v_blocks + b] = value_scale(w.v, of_tile, b, slot);
  } else {
    for (uint b = 0; b < w.v_blocks; ++b) scales[grid.lane * w.v_blocks + b] = 0;
  }
  const uint every = (1u << w.tile.rows) - 1;
  const bool guarded = simd_any(seen != every);
  const uint each = (w.v.dim + kLanes - 1) / kLanes;
  GYRE_UNROLL
  for (uint r = 0; r < rows; ++r) {
    const bool sees_key = (seen >> r & 1) != 0;
    const float x = sees_key ? logit_of(score[r], p, notes[r], key) : minus_infinity();
    const float max_logit = max(softmax.max_logit[r], simd_max(x)),
                reference = reference_of(max_logit);
    const float rescale = exp2_of(softmax.max_logit[r] - reference);
    const float weight = sees_key ? exp2_of(x - reference) : 0.0f;
    softmax.sum[r] = softmax.sum[r] * rescale + weight;
    softmax.max_logit[r] = max_logit;
    weights[grid.lane * rows + r] = weight;
    if (rescale != 1.0f) {
      GYRE_UNROLL
      for (uint i = 0; i < each; ++i) sums.at[i * rows + r] *= rescale;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint t = 0; t < kBlockKeys / abi::kKvTile; ++t) {
    const ulong index = block * (kBlockKeys / abi::kKvTile) + t;
    if (!w.tile.has_keys(index)) continue;
    const TileAt here = tile_at(w.tile, p.table, w.shape.paged, index, invalid);
    const device uchar* const codes = w.v.codes + here.offset + here.tile * w.v.tile_stride;
    const uint first = t * abi::kKvTile;
    if (abi::kv_is_native(w.v.format)) {
      add_levels(w.v, codes, weights + first * rows, scales + first * w.v_blocks, w.v_blocks, rows,
                 grid.lane, guarded, sums);
    } else {
      add_rows(w.v, codes, weights + first * rows, scales + first * w.v_blocks, w.v_blocks, rows,
               grid.lane, guarded, sums);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Sums of the simdgroups to one, in their order; then rows leave the rotated domain.
inline void finish_rows(const thread RowsWorker& w, constant abi::AttentionParams& p,
                        const thread AttentionPointers& at, const thread Grid& grid,
                        const thread LaneSoftmax& softmax, const thread LaneSums& sums,
                        bool invalid) {
  const uint rows = w.shape.rows, dim = w.v.dim, each = (dim + kLanes - 1) / kLanes;
  threadgroup float* const x = reinterpret_cast<threadgroup float*>(grid.shared);
  threadgroup float* const states =
      reinterpret_cast<threadgroup float*>(grid.shared + w.layout.states);
  GYRE_UNROLL
  for (uint r = 0; r < rows; ++r) {
    float sum = softmax.sum[r];
    for (ushort step = kLanes / 2; step != 0; step /= 2) sum += simd_shuffle_xor(sum, step);
    if (simd_any(invalid)) sum = as_type<float>(0x7FC00000u);
    if (grid.lane == 0) {
      states[(grid.simdgroup * rows + r) * 2] = softmax.max_logit[r];
      states[(grid.simdgroup * rows + r) * 2 + 1] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // and nobody reads queries any more
  for (uint s = 0; s < kAttentionSimdgroups; ++s) {
    GYRE_UNROLL
    for (uint r = 0; r < rows; ++r) {
      if (s != grid.simdgroup) continue;
      float max_logit = minus_infinity();
      for (uint o = 0; o < kAttentionSimdgroups; ++o)
        max_logit = max(max_logit, states[(o * rows + r) * 2]);
      const float factor = exp2_of(softmax.max_logit[r] - reference_of(max_logit));
      GYRE_UNROLL
      for (uint i = 0; i < each; ++i) {
        const uint c = grid.lane * each + i;
        if (c >= dim) continue;
        const float part = sums.at[i * rows + r] * factor;
        x[c * rows + r] = s == 0 ? part : x[c * rows + r] + part;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  rotate_rows(x, rows, rows, w.v.format, dim, true, grid);
  const float unit = abi::kv_is_native(w.v.format) ? kScaleUnit : 1.0f;
  for (uint r = grid.simdgroup; r < w.tile.rows; r += kAttentionSimdgroups) {
    SoftmaxState state = {minus_infinity(), 0};
    for (uint s = 0; s < kAttentionSimdgroups; ++s)
      state.max_logit = max(state.max_logit, states[(s * rows + r) * 2]);
    for (uint s = 0; s < kAttentionSimdgroups; ++s) {
      state.sum += states[(s * rows + r) * 2 + 1] *
                   exp2_of(states[(s * rows + r) * 2] - reference_of(state.max_logit));
    }
    write_row(x + r, rows, r, state, unit, w.tile, p, at, dim, grid);
  }
}

inline void attend_rows(constant abi::AttentionParams& p, const thread AttentionPointers& at,
                        const thread Grid& grid, AttentionShape shape) {
  RowsWorker w = {};
  w.shape = shape;
  const bool placed = shape.paged ? place_batch_tile(w.tile, p, at, grid, shape.rows, kBlockKeys)
                                  : place_cache_tile(w.tile, p, at, grid, shape.rows, kBlockKeys);
  if (!placed || leave_empty_split(w.tile, p, at, shape.v_dim, grid) ||
      merge_splits(w.tile, p, at, shape.rows, shape.v_dim, grid))
    return;
  w.v_blocks = value_blocks(shape.v_format, shape.v_dim);
  w.layout = attention_layout(shape.k_dim, shape.v_dim, shape.rows, w.v_blocks);
  const ulong pages = shape.paged ? p.table.page_stride : 0;
  w.k = stored_side(at.k_codes, at.k_scales, p.k, shape.k_format, shape.k_dim, w.tile.kv_head,
                    pages, grid.aligned(abi::arg_k_codes), grid.aligned(abi::arg_k_scales));
  w.v = stored_side(at.v_codes, at.v_scales, p.v, shape.v_format, shape.v_dim, w.tile.kv_head,
                    pages, grid.aligned(abi::arg_v_codes), grid.aligned(abi::arg_v_scales));
  threadgroup float* const q = reinterpret_cast<threadgroup float*>(grid.shared);
  make_notes(reinterpret_cast<threadgroup RowNotes*>(grid.shared + w.layout.notes), w.tile, p, at,
             grid);
  load_queries(q, shape.rows, 0, w.tile.rows, w.tile, p, at, shape.k_format, shape.k_dim, grid);
  LaneSoftmax softmax = {};
  LaneSums sums = {};
  GYRE_UNROLL
  for (uint r = 0; r < shape.rows; ++r) softmax.max_logit[r] = minus_infinity();
  bool invalid = w.tile.invalid;
  const ulong blocks = (w.tile.walk.tiles * abi::kKvTile + kBlockKeys - 1) / kBlockKeys;
  // Over pages a block's simdgroup follows from its keys, not from where the walk begins.
  const uint before = static_cast<uint>(w.tile.base_tile * abi::kKvTile / kBlockKeys);
  ulong block = (grid.simdgroup - before) % kAttentionSimdgroups;
  for (; block < blocks; block += kAttentionSimdgroups)
    attend_block(w, p, at, grid, block, q, softmax, sums, invalid);
  finish_rows(w, p, at, grid, softmax, sums, invalid);
}

}  // namespace metal
}  // namespace gyre
