#pragma once
// Decode attention over pages: what the warps of a block share beside their rings.
#include "cuda/kernels/attention/common/schedule_run.cuh"
#include "cuda/kernels/attention/decode/paged_layout.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/block_instructions.cuh"

namespace gyre::cuda {

// A split that a warp loads, or works on. Positions count slots from the split's first stage on.
struct QueuedSplit {
  uint32_t run, nth;           // which of the run's splits
  uint32_t base, skip, count;  // first slot of the first stage; positions of its keys
  CommonKeys common;           // of the work item's rows, counted from the first of these keys
  uint32_t invalid;            // 1: a page that does not exist
  uint32_t stages;             // at least one
};

struct PagedState {
  abi::AttentionRun runs[kMaxItemSlots];  // at hand, and their work items' slots
  uint32_t before[kMaxItemSlots];         // splits of the runs before
  QueuedSplit queue[kDecodeMaxWarps][kQueuedSplits];
  PhaseBarrier ready[kMaxItemSlots];  // a work item's queries are there
  SharedLevelTable table_k, table_v;
  uint32_t stale[kMaxItemSlots];  // 1: the schedule was made with other numbers of the sequence
  uint32_t count, splits, next;   // runs at hand, their splits, the next one that nobody took
  uint32_t takers;                // warps that take splits, or groups of warps that share keys
  uint32_t merge_groups;          // of the first block's fold; 0: another block merges
  uint32_t finished;              // bits of the runs at hand whose rows can be written

  // Where warps take whatever comes next: as many rounds as all of them would take, of equal size,
  // because a warp that runs alone is slow.
  void begin(uint32_t run_count, uint32_t split_count, uint32_t warps, bool takes_next) {
    const uint32_t rounds = (split_count + warps - 1) / warps;
    takers = takes_next && rounds != 0 ? (split_count + rounds - 1) / rounds : warps;
    next = takers;
    count = run_count, splits = split_count, finished = 0;
  }
};
static_assert(sizeof(PagedState) <= kPagedStateBytes);

// Keys of a split that some row of the work item sees.
struct VisibleKeys {
  uint32_t first, count;
  CommonKeys common;
};
inline VisibleKeys visible_keys(const abi::AttentionParams& p, const abi::AttentionRun& run,
                                uint32_t split, uint32_t stage_keys) {
  const uint32_t shift = run.shift, begin = split << shift;
  const uint32_t behind = begin + (1u << shift);
  const auto low = static_cast<int32_t>(begin < run.begin ? run.begin : begin);
  const auto high = static_cast<int32_t>(behind < run.end ? behind : run.end);
  // The sequence's bounds are those of its only token.
  if (run.tokens == 1)
    return {static_cast<uint32_t>(low), high > low ? static_cast<uint32_t>(high - low) : 0, {1}};
  const abi::RowMask<int32_t> mask = run_mask(p, run);
  const auto first_token = static_cast<int32_t>(run.first_row / p.group);
  const auto last_token = static_cast<int32_t>((run.first_row + run.rows - 1) / p.group);
  const DecodeBounds oldest = abi::row_bounds<int32_t>(mask, first_token, low, high);
  const DecodeBounds newest = abi::row_bounds<int32_t>(mask, last_token, low, high);
  const uint32_t count =
      newest.end > oldest.begin ? static_cast<uint32_t>(newest.end - oldest.begin) : 0;
  return {static_cast<uint32_t>(oldest.begin), count, CommonKeys::of(oldest, newest, stage_keys)};
}

// The work item's rows, as far as queries and masks are concerned.
inline DecodeProblem item_problem(const abi::AttentionParams& p, const Args& args,
                                  const abi::AttentionRun& run) {
  DecodeProblem problem = {};
  problem.kv_head = run.kv_head, problem.group = p.group;
  problem.first_row = run.first_row, problem.rows = run.rows;
  problem.mask = run_mask(p, run);
  problem.first = run.begin;
  const uint32_t last_row = run.first_row + run.rows - 1;
  problem.common.all = run.first_row / p.group == last_row / p.group ? 1 : 0;
  problem.plain_logits = p.soft_cap == 0 && args.at[arg_alibi_slopes] == 0;
  return problem;
}

// A walk in which position 0 is that of a stage, wherever the keys begin.
inline DecodeWalk split_walk(uint32_t skip, uint32_t count, uint32_t stage_keys) {
  DecodeWalk w = {};
  w.skip = skip;
  w.end_a = skip + count;
  w.tiles_a = count == 0 ? 0 : (w.end_a + abi::kKvTile - 1) / abi::kKvTile;
  w.tiles = w.tiles_a;
  w.end_b = w.tiles_a * abi::kKvTile;
  w.starts_a = count < stage_keys ? 0 : count - stage_keys + 1;
  return w;
}

}  // namespace gyre::cuda
