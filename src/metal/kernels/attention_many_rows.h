#pragma once
// What a thread group of attention_many_rows does, step by step.
#include "metal/kernels/attention_stage.h"

namespace gyre {
namespace metal {

constant constexpr uint kMatrix = 8;
constant constexpr uint kMaxMatrices = kMaxManyRowsDim / kMatrix;

// A simdgroup's eight rows. Loops over matrices have a fixed count, for every compiler to unroll,
// and what the head dims do not reach is left out inside.
struct RowMatrices {
  simdgroup_float8x8 q[kMaxMatrices], sums[kMaxMatrices];
  uint2 place;  // rows of a lane's two values of a matrix
  float max_logit[kMatrix];
  float sum[kMatrix];  // of the lane's keys
};

inline threadgroup float* floats_at(const thread Grid& grid, uint offset) {
  return reinterpret_cast<threadgroup float*>(grid.shared + offset);
}

// Which rows a lane has is Metal's affair: a matrix of row numbers tells.
inline void find_rows(thread RowMatrices& rows, threadgroup float* square,
                      const thread Grid& grid) {
  for (uint i = grid.lane; i < kMatrix * kMatrix; i += kLanes)
    square[i] = static_cast<float>(i / kMatrix);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 numbers;
  simdgroup_load(numbers, square, kMatrix);
  rows.place.x = static_cast<uint>(numbers.thread_elements()[0]);
  rows.place.y = static_cast<uint>(numbers.thread_elements()[1]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Queries to registers, as many rows at a time as the memory holds.
inline void start_rows(thread RowMatrices& rows, const thread RowTile& tile,
                       constant abi::AttentionParams& p, const thread AttentionPointers& at,
                       const thread Grid& grid, const thread AttentionShape& shape) {
  const uint at_once = many_rows_staged(shape.k_dim);
  threadgroup float* const x = floats_at(grid, 0);
  for (uint first = 0; first < kManyRowsTile; first += at_once) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = grid.index; i < at_once * shape.k_dim; i += grid.threads) x[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint left = tile.rows > first ? tile.rows - first : 0;
    const uint count = left < at_once ? left : at_once;
    load_queries(x, at_once, first, count, tile, p, at, shape.k_format, shape.k_dim, grid);
    const uint first_row = grid.simdgroup * kMatrix;
    if (first_row >= first && first_row < first + at_once) {
      GYRE_UNROLL
      for (uint c = 0; c < kMaxMatrices; ++c) {
        if (c >= shape.k_dim / kMatrix) continue;
        simdgroup_load(rows.q[c], x + c * kMatrix * at_once + (first_row - first), at_once,
                       ulong2{0, 0}, true);
      }
    }
  }
  GYRE_UNROLL
  for (uint c = 0; c < kMaxMatrices; ++c)
    rows.sums[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  GYRE_UNROLL
  for (uint r = 0; r < kMatrix; ++r) rows.max_logit[r] = minus_infinity(), rows.sum[r] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Scores of the simdgroup's rows, [row][key].
inline void score_stage(thread RowMatrices& rows, const threadgroup float* keys, uint k_dim,
                        uint count, threadgroup float* scores) {
  for (uint k = 0; k < count / kMatrix; ++k) {
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    GYRE_UNROLL
    for (uint c = 0; c < kMaxMatrices; ++c) {
      if (c >= k_dim / kMatrix) continue;
      simdgroup_float8x8 b;
      simdgroup_load(b, keys + k * kMatrix * k_dim + c * kMatrix, k_dim, ulong2{0, 0}, true);
      simdgroup_multiply_accumulate(sum, rows.q[c], b, sum);
    }
    simdgroup_store(sum, scores + k * kMatrix, count);
  }
}

// Scores become weights. The rows' sums so far must be multiplied with `rescales`. False: all
// are 1.
inline bool softmax_weights(thread RowMatrices& rows, const thread Stage& s,
                            constant abi::AttentionParams& p, const thread AttentionPointers& at,
                            const thread Grid& grid, const threadgroup RowNotes* notes,
                            threadgroup float* scores, thread float* rescales) {
  const ulong position = s.first + grid.lane;
  const bool held = grid.lane < s.keys && s.tile.holds_key(position);
  const long key = held ? s.tile.key_of(position) : 0;
  const device uchar* const tree_mask = grid.has(abi::arg_tree_mask) ? at.tree_mask : nullptr;
  bool changed = false;
  GYRE_UNROLL
  for (uint r = 0; r < kMatrix; ++r) {
    const uint row = grid.simdgroup * kMatrix + r;
    const bool sees_key =
        held && row < s.tile.rows && sees(notes[row], s.tile, key, tree_mask, p.tree_stride);
    const float score = grid.lane < s.keys ? scores[r * s.keys + grid.lane] : 0;
    const float x = sees_key ? logit_of(score, p, notes[row], key) : minus_infinity();
    const float max_logit = max(rows.max_logit[r], simd_max(x)),
                reference = reference_of(max_logit);
    rescales[r] = exp2_of(rows.max_logit[r] - reference);
    changed = changed || rescales[r] != 1.0f;
    const float weight = sees_key ? exp2_of(x - reference) : 0.0f;
    rows.sum[r] = rows.sum[r] * rescales[r] + weight;
    rows.max_logit[r] = max_logit;
    if (grid.lane < s.keys) scores[r * s.keys + grid.lane] = weight;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return changed;
}

// Rescales sums one by one: in a product with a diagonal matrix a non-finite sum would
// reach other rows. A row that saw nothing yet has sums of 0, whatever they are multiplied with.
inline void scale_sums(thread RowMatrices& rows, uint v_dim, const thread float* rescales) {
  float2 rescale = {0, 0};  // of the rows of a lane's two values
  GYRE_UNROLL
  for (uint r = 0; r < kMatrix; ++r) {
    rescale.x = rows.place.x == r ? rescales[r] : rescale.x;
    rescale.y = rows.place.y == r ? rescales[r] : rescale.y;
  }
  GYRE_UNROLL
  for (uint c = 0; c < kMaxMatrices; ++c) {
    if (c >= v_dim / kMatrix) continue;
    const float first = rows.sums[c].thread_elements()[0];
    const float second = rows.sums[c].thread_elements()[1];
    rows.sums[c].thread_elements()[0] = rescale.x == 0 ? 0.0f : first * rescale.x;
    rows.sums[c].thread_elements()[1] = rescale.y == 0 ? 0.0f : second * rescale.y;
  }
}

// Values that are not finite, for the rows that see them: in a matrix product they would reach the
// others.
inline void add_non_finite_values(thread RowMatrices& rows, const threadgroup float* weights,
                                  const threadgroup float* values, uint v_dim, uint count,
                                  threadgroup float* square, const thread Grid& grid) {
  GYRE_UNROLL
  for (uint c = 0; c < kMaxMatrices; ++c) {
    if (c >= v_dim / kMatrix) continue;
    simdgroup_store(rows.sums[c], square, kMatrix);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = grid.lane; i < kMatrix * kMatrix; i += kLanes) {
      for (uint k = 0; k < count; ++k) {
        const float weight = weights[i / kMatrix * count + k];
        const float value = values[k * v_dim + c * kMatrix + i % kMatrix];
        if (weight != 0 && !isfinite(value)) square[i] += weight * value;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(rows.sums[c], square, kMatrix);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Sums plus weights times values, which are finite.
inline void add_stage(thread RowMatrices& rows, const threadgroup float* weights,
                      const threadgroup float* values, uint v_dim, uint count) {
  constexpr uint kMaxKeyTiles = kMaxStageKeys / kMatrix;
  simdgroup_float8x8 of_keys[kMaxKeyTiles];
  GYRE_UNROLL
  for (uint k = 0; k < kMaxKeyTiles; ++k) {
    if (k >= count / kMatrix) continue;
    simdgroup_load(of_keys[k], weights + k * kMatrix, count);
  }
  GYRE_UNROLL
  for (uint c = 0; c < kMaxMatrices; ++c) {
    if (c >= v_dim / kMatrix) continue;
    GYRE_UNROLL
    for (uint k = 0; k < kMaxKeyTiles; ++k) {
      if (k >= count / kMatrix) continue;
      simdgroup_float8x8 b;
      simdgroup_load(b, values + k * kMatrix * v_dim + c * kMatrix, v_dim);
      simdgroup_multiply_accumulate(rows.sums[c], of_keys[k], b, rows.sums[c]);
    }
  }
}

inline void finish_many_rows(thread RowMatrices& rows, const thread RowTile& tile,
                             constant abi::AttentionParams& p, const thread AttentionPointers& at,
                             const thread Grid& grid, const thread AttentionShape& shape,
                             bool invalid) {
  const uint at_once = many_rows_staged(shape.v_dim), first_row = grid.simdgroup * kMatrix;
  threadgroup float* const x = floats_at(grid, 0);
  const float unit = abi::kv_is_native(shape.v_format) ? kScaleUnit : 1.0f;
  for (uint first = 0; first < kManyRowsTile; first += at_once) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool here = first_row >= first && first_row < first + at_once;
    GYRE_UNROLL
    for (uint c = 0; c < kMaxMatrices; ++c) {
      if (!here || c >= shape.v_dim / kMatrix) continue;
      simdgroup_store(rows.sums[c], x + c * kMatrix * at_once + (first_row - first), at_once,
                      ulong2{0, 0}, true);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    rotate_rows(x, at_once, at_once, shape.v_format, shape.v_dim, true, grid);
    GYRE_UNROLL
    for (uint r = 0; r < kMatrix && here; ++r) {
      SoftmaxState state = {rows.max_logit[r], rows.sum[r]};
      for (ushort step = kLanes / 2; step != 0; step /= 2)
        state.sum += simd_shuffle_xor(state.sum, step);
      if (invalid) state.sum = as_type<float>(0x7FC00000u);
      if (first_row + r < tile.rows) {
        write_row(x + (first_row - first) + r, at_once, first_row + r, state, unit, tile, p, at,
                  shape.v_dim, grid);
      }
    }
  }
}

inline void attend_many_rows(constant abi::AttentionParams& p, const thread AttentionPointers& at,
                             const thread Grid& grid, AttentionShape shape) {
  Stage s = {};
  s.paged = shape.paged;
  s.keys = many_rows_keys(shape.k_dim, shape.v_dim);
  const bool placed = shape.paged ? place_batch_tile(s.tile, p, at, grid, kManyRowsTile, s.keys)
                                  : place_cache_tile(s.tile, p, at, grid, kManyRowsTile, s.keys);
  if (!placed) return;
  s.v_blocks = value_blocks(shape.v_format, shape.v_dim);
  const ulong pages = shape.paged ? p.table.page_stride : 0;
  s.k = stored_side(at.k_codes, at.k_scales, p.k, shape.k_format, shape.k_dim, s.tile.kv_head,
                    pages, grid.aligned(abi::arg_k_codes), grid.aligned(abi::arg_k_scales));
  s.v = stored_side(at.v_codes, at.v_scales, p.v, shape.v_format, shape.v_dim, s.tile.kv_head,
                    pages, grid.aligned(abi::arg_v_codes), grid.aligned(abi::arg_v_scales));
  const ManyRowsLayout layout = many_rows_layout(shape.k_dim, shape.v_dim);
  threadgroup RowNotes* const notes =
      reinterpret_cast<threadgroup RowNotes*>(grid.shared + layout.notes);
  threadgroup float* const staged = floats_at(grid, 0);
  threadgroup float* const scores =
      floats_at(grid, layout.scores) + grid.simdgroup * kMatrix * s.keys;
  threadgroup float* const square =
      floats_at(grid, layout.squares) + grid.simdgroup * kMatrix * kMatrix;
  threadgroup uint* const flags = reinterpret_cast<threadgroup uint*>(grid.shared + layout.flags);
  RowMatrices rows;
  if (grid.index < kAttentionSimdgroups * 2) flags[grid.index] = 0;
  make_notes(notes, s.tile, p, at, grid);
  find_rows(rows, square, grid);
  start_rows(rows, s.tile, p, at, grid, shape);
  bool invalid = s.tile.invalid;
  const ulong stages = (s.tile.walk.tiles * abi::kKvTile + s.keys - 1) / s.keys;
  for (ulong stage = 0; stage < stages; ++stage) {
    s.first = stage * s.keys;
    decode_keys(s, p, grid, staged, invalid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    score_stage(rows, staged, shape.k_dim, s.keys, scores);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float rescales[kMatrix];
    const bool changed = softmax_weights(rows, s, p, at, grid, notes, scores, rescales);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody reads keys any more
    const bool non_finite = simd_any(decode_values(s, p, grid, staged, invalid));
    if (grid.lane == 0) flags[grid.simdgroup] = non_finite ? 1 : 0;
    if (changed) scale_sums(rows, shape.v_dim, rescales);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool any_non_finite = false;
    for (uint i = 0; i < kAttentionSimdgroups; ++i)
      any_non_finite = any_non_finite || flags[i] != 0;
    if (any_non_finite) {
      add_non_finite_values(rows, scores, staged, shape.v_dim, s.keys, square, grid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = grid.index; i < s.keys * shape.v_dim; i += grid.threads) {
        if (!isfinite(staged[i])) staged[i] = 0;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    add_stage(rows, scores, staged, shape.v_dim, s.keys);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const bool any_invalid = simd_any(invalid);
  if (grid.lane == 0 && any_invalid) flags[kAttentionSimdgroups + grid.simdgroup] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < kAttentionSimdgroups; ++i)
    invalid = invalid || flags[kAttentionSimdgroups + i] != 0;
  finish_many_rows(rows, s.tile, p, at, grid, shape, invalid);
}

}  // namespace metal
}  // namespace gyre
