#pragma once
// Attention of many rows, of draft tokens over pages: work tiles from the step schedule
// (abi/attention_schedule.h). A tile is a group of a run's splits, for all rows of a work item. The
// states of a work item's groups are folded in the order of their keys, by the block that has them
// all, or by the last one to come of several: a row's bits do not depend on how blocks share the
// groups.
#include "cuda/kernels/attention/common/row_output.cuh"
#include "cuda/kernels/attention/common/row_tile_batch.cuh"
#include "cuda/kernels/attention/common/schedule_run.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

// Where the states of a work item's groups lie.
class ItemStates {
 public:
  ItemStates(const RowTile& tile, const Args& args, const abi::AttentionRun& run)
      : row_bytes_(uint64_t{tile.params.v.head_dim + 2} * 4),
        group_bytes_(many_rows_item_rows(tile.params.table.max_query_length, tile.params.group) *
                     row_bytes_),
        begin_(args.at[abi::arg_partial] + paged_counter_bytes(gridDim.x) +
               run.area * (kManyRowsCut.max_splits * group_bytes_)) {}
  uint64_t at(uint32_t group, uint32_t row = 0) const {
    return begin_ + group * group_bytes_ + row * row_bytes_;
  }

 private:
  uint64_t row_bytes_, group_bytes_, begin_;
};

// The tile of a group of the run at hand. One thread.
inline void place_run_tile(ManyRowsState& state, const Args& args, uint32_t group) {
  using enum abi::AttentionArg;
  RowTile& tile = state.tile;
  const abi::AttentionParams& p = tile.params;
  const abi::AttentionRun& run = state.run;
  const RunGroups groups(run);
  tile.sequence = run.sequence, tile.kv_head = run.kv_head;
  tile.first_row = run.first_row, tile.rows = run.rows;
  tile.first_token = run.first_token;
  tile.split = 0;
  tile.entries = pointer<const uint32_t>(args.at[arg_table]) + run.sequence * p.table.stride +
                 p.table.first_entry;
  tile.invalid = run.valid == 0 || is_stale(args, run) ? 1 : 0;
  const ItemStates states(tile, args, run);
  state.older = groups.first == 0 && group != 0 ? states.at(0) : 0;
  state.states = groups.first == 0 ? states.at(0) : states.at(group);
  if (groups.whole() && group + 1 == groups.end) state.states = 0;
  place_head(tile, args);
  tile.mask = {static_cast<int64_t>(run.length), static_cast<int64_t>(run.tokens),
               abi::row_window<int64_t>(p.window), p.causal != 0};
  abi::fill_segment(tile.mask, p.segment, p.places, uint64_t{run.tail_begin});
  const uint32_t shift = run.shift + run.group_shift;
  const uint64_t number = (run.item_first >> run.group_shift) + group;
  const uint64_t from = number << shift, to = (number + 1) << shift;
  tile.first_key = static_cast<int64_t>(from < run.begin ? run.begin : from);
  tile.last_key = static_cast<int64_t>(to < run.end ? to : run.end);
  if (tile.last_key < tile.first_key) tile.last_key = tile.first_key;
  place_page_walk(tile);
}

// Folds the states of a work item's groups and writes its rows, a warp to a row.
template <class T>
inline void fold_item(const ManyRowsState& state, const Args& args, uint32_t groups) {
  const uint32_t done = state.merge_groups;  // their fold is the first state
  constexpr uint32_t kOfLane = (T::kVDim + kWarp - 1) / kWarp, kAtOnce = 8;
  const RowTile& tile = state.tile;
  const uint32_t lane = threadIdx.x % kWarp;
  const ItemStates states(tile, args, state.run);
#pragma unroll 1
  for (uint32_t r = threadIdx.x / kWarp; r < state.run.rows;
       r += T::kGroups * kGroupThreads / kWarp) {
    SoftmaxState row = SoftmaxState::none();
    float x[kOfLane] = {};
    // States 0 and `done` on, the loads of several at a time: each takes a microsecond.
    const uint32_t states_count = groups - done + 1;
#pragma unroll 1
    for (uint32_t first = 0; first < states_count; first += kAtOnce) {
      float of[kAtOnce][kOfLane + 2];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t nth = first + i < states_count ? first + i : first;
        const uint64_t at = states.at(nth == 0 ? 0 : done - 1 + nth, r);
        const auto number = [&](uint32_t column) {
          return __uint_as_float(load_l2<uint32_t>(at + column * 4));
        };
#pragma unroll
        for (uint32_t c = 0; c < kOfLane; ++c)
          of[i][c] = lane + c * kWarp < T::kVDim ? number(lane + c * kWarp) : 0.0f;
        of[i][kOfLane] = number(T::kVDim), of[i][kOfLane + 1] = number(T::kVDim + 1);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + i >= states_count) break;
        const SoftmaxState::Factors f = row.fold({of[i][kOfLane], of[i][kOfLane + 1]});
#pragma unroll
        for (uint32_t c = 0; c < kOfLane; ++c) x[c] = f.fold(x[c], of[i][c]);
      }
    }
    const RowWriter writer(tile.params, args,
                           {tile.first_token + tile.token(r), tile.head(r), 0, false}, row,
                           lane == 0);
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i)
      if (T::kVDim % kWarp == 0 || lane + i * kWarp < T::kVDim) writer.put(lane + i * kWarp, x[i]);
  }
}

// The tiles of a block's runs, one after the other; all threads of a role.
template <class T, bool kConsumers, class Role>
inline void for_each_run(ManyRowsState& state, const Args& args, const Role& role) {
  const BlockRuns runs(state.tile.params, args, T::kLayout.blocks);
#pragma unroll 1
  for (uint32_t index = 0; index < runs.count; ++index) {
    if (kConsumers && threadIdx.x < abi::kRunWords) {
      const uint64_t from =
          args.at[abi::arg_schedule] +
          4 * (abi::schedule_runs_at(gridDim.x) + uint64_t{runs.first + index} * abi::kRunWords);
      reinterpret_cast<uint32_t*>(&state.run)[threadIdx.x] = load_bits(from, threadIdx.x, true);
    }
    __syncthreads();
    const RunGroups groups(state.run);
#pragma unroll 1
    for (uint32_t group = groups.first; group < groups.end; ++group) {
      if (kConsumers && threadIdx.x == 0) {
        place_run_tile(state, args, group);
        init_barriers<T>(state);
      }
      __syncthreads();
      role();
      __syncthreads();
      if (kConsumers && threadIdx.x == 0) end_barriers<T>(state);
    }
    if (!groups.whole() && kConsumers) {
      if (threadIdx.x == 0)
        state.merge_groups = count_groups(args.at[abi::arg_partial] + state.run.area * 4, groups);
      sync_named_barrier<T::kGroups * kGroupThreads / kWarp>(kConsumerRole);
      if (state.merge_groups != 0) fold_item<T>(state, args, groups.all);
    }
    __syncthreads();
  }
}

}  // namespace gyre::cuda
