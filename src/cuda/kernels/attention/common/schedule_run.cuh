#pragma once
// A run of the step schedule (abi/attention_schedule.h) as the kernels that read it see it.
#include "abi/attention_bounds.h"
#include "abi/attention_schedule.h"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/instructions.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

inline abi::RowMask<int32_t> run_mask(const abi::AttentionParams& p, const abi::AttentionRun& run) {
  abi::RowMask<int32_t> mask = {static_cast<int32_t>(run.length), static_cast<int32_t>(run.tokens),
                                abi::row_window<int32_t>(p.window), p.causal != 0};
  abi::fill_segment(mask, p.segment, p.places, run.tail_begin);
  return mask;
}

// Whether the sequence's length or its place in q changed since the schedule was made.
inline bool is_stale(const Args& args, const abi::AttentionRun& run) {
  using enum abi::AttentionArg;
  return load_bits(args.at[arg_kv_lengths], run.sequence, true) != run.length ||
         load_bits(args.at[arg_cu_seqlens_q], run.sequence, true) != run.first_token;
}

// What the schedule has for this block. Neighbouring shares go to one multiprocessor: where there
// are fewer groups than blocks, every multiprocessor gets one.
struct BlockRuns {
  uint32_t first, count;  // runs

  static uint32_t share(uint32_t blocks) {
    const uint32_t each = gridDim.x / blocks;
    return blockIdx.x % each * blocks + blockIdx.x / each;
  }
  BlockRuns(const abi::AttentionParams& p, const Args& args, uint32_t blocks) {
    const uint32_t at = share(blocks) * 4;
    // Loaded in a way that the compiler does not know: it would spend minutes on aliases.
    const auto word = [&](uint32_t i) {
      return load_bits(args.at[abi::arg_schedule], at + i, true);
    };
    const uint32_t key = word(0), blocks_of = word(1), runs = word(3);
    first = word(2);
    // A schedule of something else: nothing that it says may be used.
    count = key == p.schedule_key && blocks_of == gridDim.x ? runs : 0;
  }
};

// Groups of a run's work item, numbered from the work item's first.
struct RunGroups {
  uint32_t first, end, all;  // of the run; of the work item

  explicit RunGroups(const abi::AttentionRun& run) {
    const uint32_t shift = run.group_shift, base = run.item_first >> shift;
    first = optimization_barrier((run.first >> shift) - base);
    end = optimization_barrier(((run.first + run.count - 1) >> shift) + 1 - base);
    all = ((run.item_end - 1) >> shift) + 1 - base;
  }
  bool whole() const { return first == 0 && end == all; }
};

// Counts the groups of a run of a work item that several blocks share, `counter` being the work
// item's. The last block to come gets the number of groups that the first one folded, others 0.
inline uint32_t count_groups(uint64_t counter, const RunGroups& of) {
  const uint32_t count = of.end - of.first, add = count | (of.first == 0 ? count << 16 : 0);
  const uint32_t all = atomic_add_acq_rel(counter, add) + add;
  if ((all & 0xFFFFu) != of.all) return 0;
  *pointer<uint32_t>(counter) = 0;  // for the next replay
  return all >> 16;
}

}  // namespace gyre::cuda
