#pragma once
// Rows of attention: into and out of the domain in which a compressed format stores a head, the
// online softmax, and the end of a row. Coordinate c of row r lies at [c * pitch + r] of the
// group's memory.
#include "metal/kernels/attention_tile.h"
#include "metal/kernels/row.h"

namespace gyre {
namespace metal {

constant constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

inline float minus_infinity() { return as_type<float>(0xFF800000u); }

// A row in the group's memory.
struct GroupRow {
  threadgroup float* x;  // its first coordinate
  uint pitch;

  float get(uint coordinate) const { return x[coordinate * pitch]; }
};
inline void put_row(const thread Row& row, const thread GroupRow& to, uint head_dim, uint lane) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint first = lane_coordinate(j, lane);
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k)
      if (first + k < head_dim) to.x[(first + k) * to.pitch] = row.y[j][k];
  }
}

// Rows to the domain in which a compressed format stores a head, or back, a simdgroup a row.
inline void rotate_rows(threadgroup float* x, uint pitch, uint rows, uint format, uint head_dim,
                        bool back, const thread Grid& grid) {
  if (!abi::kv_is_compressed(format)) return;
  for (uint r = grid.simdgroup; r < rows; r += grid.threads / kLanes) {
    const GroupRow at = {x + r, pitch};
    Row row;
    load_row(at, head_dim, grid.lane, row);
    if (back) {
      restore_row(row, format, head_dim, grid.lane);
    } else {
      rotate_row(row, format, head_dim, grid.lane);
    }
    put_row(row, at, head_dim, grid.lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What the mask needs of a row; in the group's memory.
struct RowNotes {
  long begin, end;  // keys it may see
  long position;
  float slope;
  uint token;  // for the tree mask
};

inline void make_notes(threadgroup RowNotes* notes, const thread RowTile& tile,
                       constant abi::AttentionParams& p, const thread AttentionPointers& at,
                       const thread Grid& grid) {
  for (uint r = grid.index; r < tile.rows; r += grid.threads) {
    const RowPlace place = row_place(tile, p.group, r);
    const abi::RowBounds<long> bounds = tile.bounds(place.token);
    notes[r].begin = bounds.begin;
    notes[r].end = bounds.end;
    notes[r].position = abi::row_position<long>(tile.mask, static_cast<long>(place.token));
    notes[r].slope =
        grid.has(abi::arg_alibi_slopes) ? pointer<float>(at.alibi_slopes)[place.head] : 0;
    notes[r].token = static_cast<uint>(place.token);
  }
}

inline bool sees(const threadgroup RowNotes& row, const thread RowTile& tile, long key,
                 const device uchar* tree_mask, ulong tree_stride) {
  if (key < row.begin || key >= row.end) return false;
  return tree_mask == nullptr ||
         !abi::tree_hides<long>(tree_mask + row.token * tree_stride, tile.mask, key);
}

// Queries of rows [first, first + count) to the group's memory, rotated as K is.
inline void load_queries(threadgroup float* x, uint pitch, uint first, uint count,
                         const thread RowTile& tile, constant abi::AttentionParams& p,
                         const thread AttentionPointers& at, uint k_format, uint k_dim,
                         const thread Grid& grid) {
  for (uint i = grid.index; i < count * k_dim; i += grid.threads) {
    const uint r = i / k_dim, c = i % k_dim;
    const RowPlace place = row_place(tile, p.group, first + r);
    const device uchar* const row =
        at.q + (tile.first_token + place.token) * p.q_token_stride + place.head * p.q_head_stride;
    x[c * pitch + r] = load_float(row, p.q_dtype, c);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  rotate_rows(x, pitch, count, k_format, k_dim, false, grid);
}

// cap tanh(x / cap); two terms of the series where 1 - e cancels.
inline float soft_cap(float x, float cap) {
  const float a = fabs(x) / cap, e = precise::exp2(a * (-2 * kLog2E));
  const float t = a < 0.04f ? a - a * a * a * (1.0f / 3) : (1.0f - e) / (1.0f + e);
  return copysign(t * cap, x);
}

// A row's logit in base 2.
inline float logit_of(float score, constant abi::AttentionParams& p,
                      const threadgroup RowNotes& row, long key) {
  float x = score * p.scale;
  if (p.soft_cap > 0) x = soft_cap(x, p.soft_cap);
  if (row.slope != 0) x += row.slope * static_cast<float>(key - row.position);
  return x * kLog2E;
}

// What probabilities are relative to. A row that saw nothing is relative to 0: -inf less -inf would
// be NaN.
inline float reference_of(float max_logit) {
  return max_logit == minus_infinity() ? 0.0f : max_logit;
}
inline float exp2_of(float x) { return x == minus_infinity() ? 0.0f : precise::exp2(x); }

struct SoftmaxState {
  float max_logit, sum;
};

// A sink is one more logit, whose value is 0. Returns the factor of the row's values: 1 / sum.
inline float finish_row(thread SoftmaxState& state, float sink) {
  constexpr float kMax = 3.402823466e38f;
  float rescale = 1.0f;
  if (isfinite(sink)) sink = clamp(sink * kLog2E, -kMax, kMax);
  if (sink != minus_infinity()) {
    if (sink > state.max_logit) {
      rescale = exp2_of(state.max_logit - sink);
      state.sum *= rescale;
      state.max_logit = sink;
    }
    state.sum += isnan(sink) ? sink : exp2_of(sink - state.max_logit);
  }
  return state.sum == 0 ? 0.0f : rescale / state.sum;
}
inline float log_sum_exp(SoftmaxState state) {
  return state.sum == 0 ? minus_infinity() : (state.max_logit + precise::log2(state.sum)) * kLn2;
}

// The state of a row of a split over pages: {values, max in base 2, sum}; without a sum no values.
inline device float* split_state(const thread RowTile& tile, const thread AttentionPointers& at,
                                 ulong split, uint r, uint v_dim) {
  return pointer<float>(at.partial) + (split * tile.states + tile.first_state + r) * (v_dim + 2);
}

// Row r, its values times `unit` and relative to the state's largest logit, to the output or as
// {values, max, sum} of one split. x: its first coordinate. By a simdgroup.
inline void write_row(const threadgroup float* x, uint pitch, uint r, SoftmaxState state,
                      float unit, const thread RowTile& tile, constant abi::AttentionParams& p,
                      const thread AttentionPointers& at, uint v_dim, const thread Grid& grid) {
  const RowPlace place = row_place(tile, p.group, r);
  const ulong token = tile.first_token + place.token;
  if (p.partial == abi::kAttentionPartial || p.partial == abi::kAttentionStates) {
    const bool split = tile.entries != nullptr && p.partial == abi::kAttentionPartial;
    device uchar* states = at.partial;
    if (p.partial == abi::kAttentionStates) states = at.out;
    device float* to = pointer<float>(states) +
                       ((tile.split * p.tokens + token) * p.heads + place.head) * (v_dim + 2);
    if (split) to = split_state(tile, at, tile.split, r, v_dim);
    for (uint c = grid.lane; c < v_dim; c += kLanes) to[c] = x[c * pitch] * unit;
    if (grid.lane == 0) to[v_dim] = split ? state.max_logit : state.max_logit * kLn2;
    if (grid.lane == 0) to[v_dim + 1] = state.sum;
    return;
  }
  const float sink = grid.has(abi::arg_sink_logits) ? pointer<float>(at.sink_logits)[place.head]
                                                    : minus_infinity();
  const float factor = finish_row(state, sink);
  device uchar* const to = at.out + token * p.out_token_stride + place.head * p.out_head_stride;
  for (uint c = grid.lane; c < v_dim; c += kLanes)
    store_float(to, p.out_dtype, c, x[c * pitch] * unit * factor);
  if (grid.lane == 0 && grid.has(abi::arg_lse)) {
    *pointer<float>(at.lse + token * p.lse_token_stride + place.head * p.lse_head_stride) =
        log_sum_exp(state);
  }
}

}  // namespace metal
}  // namespace gyre
