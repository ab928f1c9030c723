#pragma once
// The step schedule of decode attention over pages: which block works on which keys. One small
// kernel per step writes it; the attention of every layer with the same heads, mask and segment
// reads it. A work item is one sequence, one KV head and a group of its rows. A run is those splits
// of a work item's keys that one block has. Blocks change between work items or between groups of
// splits, never elsewhere, and states are folded from split to group to work item: bits do not
// depend on the schedule.
#include "abi/attention.h"
#include "abi/attention_cut.h"

namespace gyre::abi {

// Splits fold to a group, groups to a work item. Larger groups than the smallest, which long
// sequences have, are cut finer: one of them alone should keep all warps of a block busy.
GYRE_CONSTANT uint32_t kGroupSplitsShift = 2, kLargeGroupSplitsShift = 3;

// Splits are numbered from the sequence's first key on: split i is keys [i << shift, i + 1 <<
// shift).
struct AttentionRun {
  uint32_t sequence, kv_head;
  uint32_t first_row, rows;       // of the KV head's (token, query head) rows of the sequence
  uint32_t first_token, tokens;   // rows of q
  uint32_t length, tail_begin;    // keys of the sequence; RowMask's
  uint32_t begin, end;            // keys that some query of the sequence sees
  uint32_t first, count;          // splits of this block
  uint32_t item_first, item_end;  // splits of the work item, at least one
  uint32_t area;                  // block that has the work item's first split
  uint8_t shift, group_shift;     // of a split; a group has 1 << group_shift splits
  uint8_t valid, unused;          // 1: the sequence's numbers make sense
};
static_assert(sizeof(AttentionRun) == 64);

struct AttentionScheduleSpec {
  uint8_t unused[8];
};

struct AttentionScheduleParams {
  AttentionParams call;  // any of the step's calls: what depends on the layer is not read
  AttentionCut group;    // keys of a group of splits
  uint64_t runs;         // room for this many
  uint32_t blocks;       // of the attention kernel
  uint32_t rows;         // of a work item, at most
  uint32_t key;          // of all numbers that the schedule depends on, see ops/paged_schedule.cpp
  uint32_t unused;
};

// In 32-bit words: for each block {key, blocks, its first run, how many it has}, then the first
// runs of each, which it need not look for, then all runs.
GYRE_CONSTANT uint32_t kRunWords = sizeof(AttentionRun) / 4;
GYRE_CONSTANT uint32_t kFirstRuns = 12;
constexpr uint64_t schedule_first_runs_at(uint64_t blocks) { return (4 * blocks + 15) / 16 * 16; }
constexpr uint64_t schedule_runs_at(uint64_t blocks) {
  return schedule_first_runs_at(blocks) + blocks * kFirstRuns * kRunWords;
}
constexpr uint64_t schedule_words(uint64_t blocks, uint64_t runs) {
  return schedule_runs_at(blocks) + runs * kRunWords;
}

// Work items of a KV head that `tokens` queries of a sequence make.
constexpr uint32_t item_count(uint32_t tokens, uint32_t group, uint32_t rows) {
  return (tokens * group + rows - 1) / rows;
}
struct ItemRows {
  uint32_t first, count;
};
constexpr ItemRows item_rows(uint32_t tokens, uint32_t group, uint32_t rows, uint32_t index) {
  const uint32_t first = index * rows, left = tokens * group - first;
  return {first, left < rows ? left : rows};
}

// Runs that the sequences of a phase can have, whatever their numbers say. Where the longest ones
// are taken, so are those that claim more queries than there can be: of `all_tokens` together.
constexpr uint64_t schedule_max_runs(AttentionPhase phase, uint64_t sequences, uint64_t kv_heads,
                                     uint64_t all_tokens, uint64_t max_query_length, uint32_t group,
                                     uint32_t rows, uint64_t blocks) {
  const uint64_t fit = phase_max_rows(phase) / group;
  if (max_query_length <= fit) return (sequences + all_tokens * group / rows) * kv_heads + blocks;
  return sequences * kv_heads * item_count(static_cast<uint32_t>(fit), group, rows) + blocks;
}

}  // namespace gyre::abi
