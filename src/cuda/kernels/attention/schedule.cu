// The step schedule of decode attention over pages (abi/attention_schedule.h). Every block finds
// the share of one block of the attention kernel: a prefix sum over the cost of all sequences, then
// the runs of the share, in the order of sequence, KV head, row group and key.
#include "abi/attention_bounds.h"
#include "abi/attention_schedule.h"
#include "cuda/kernels/attention/common/row_tile_batch.cuh"

namespace gyre::cuda {

constexpr uint32_t kScheduleThreads = 256;

enum ScheduleArg : uint32_t { list_schedule, list_lengths, list_begins, list_prompts, list_tails };

// What a work item and a split cost beside their keys, in keys.
constexpr uint32_t kItemCost = 100, kSplitCost = 32;

// 32 bits where they are enough: a 64-bit division takes ten times as long.
constexpr uint64_t divide_cost(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The logarithm of abi::sequence_split_keys, whose two numbers are powers of two. Without loops:
// NVRTC would spend minutes on them.
inline uint32_t cut_shift(const abi::AttentionCut& cut, uint32_t length) {
  const auto logarithm = [](uint64_t x) { return 31 - __clz(static_cast<int32_t>(x)); };
  const int32_t least = logarithm(cut.fewest_keys);
  const int32_t needed =
      (length < 2 ? 0 : 32 - __clz(static_cast<int32_t>(length - 1))) - logarithm(cut.max_splits);
  return static_cast<uint32_t>(needed > least ? needed : least);
}

// A sequence of the batch, and its work in groups of splits.
struct SequenceWork {
  uint32_t first_token, tokens, length, tail_begin;
  bool valid;
  uint32_t begin, end;            // keys that some query sees
  uint32_t shift, first, groups;  // groups of 1 << shift keys; at least one
  uint32_t group_shift;           // splits of a group
  uint32_t items;                 // of a KV head; 0: another command's, or nothing to do

  constexpr uint64_t group_cost() const { return uint64_t{kSplitCost} << group_shift; }

  // Where group i begins in the cost of its work item.
  constexpr uint64_t start(uint32_t i) const {
    if (i == 0) return 0;
    const uint64_t key = static_cast<uint64_t>(first + i) << shift;
    return kItemCost + key - begin + i * group_cost();
  }
  // The first group that begins at `into` or later; `groups`: none does.
  constexpr uint32_t group_from(uint64_t into) const {
    if (into == 0) return 0;
    const uint64_t second = start(1), each = (uint64_t{1} << shift) + group_cost();
    const uint64_t group = into <= second ? 1 : 1 + divide_cost(into - second + each - 1, each);
    return group < groups ? static_cast<uint32_t>(group) : groups;
  }
  constexpr uint64_t item_cost() const {
    return kItemCost + uint64_t{end - begin} + groups * group_cost();
  }
};

inline SequenceWork sequence_work(const abi::AttentionScheduleParams& params, const Args& args,
                                  uint32_t index) {
  const abi::AttentionParams& p = params.call;
  const auto* const begins = pointer<const int32_t>(args.at[list_begins]);
  const bool prompt =
      args.at[list_prompts] != 0 && pointer<const uint8_t>(args.at[list_prompts])[index] != 0;
  const abi::BatchSequence of =
      abi::batch_sequence(p.table, p.tokens, begins[index], begins[index + 1],
                          pointer<const int32_t>(args.at[list_lengths])[index]);
  SequenceWork work = {};
  work.first_token = static_cast<uint32_t>(of.first_token);
  work.tokens = static_cast<uint32_t>(of.tokens);
  work.length = static_cast<uint32_t>(of.length);
  work.valid = of.valid;
  if (of.tokens != 0 &&
      abi::attention_takes(p.phase, of.tokens, p.table.max_query_length, p.group, prompt))
    work.items = abi::item_count(work.tokens, p.group, params.rows);
  const auto length = static_cast<int32_t>(of.length);
  abi::RowMask<int32_t> mask = {length, static_cast<int32_t>(work.tokens),
                                abi::row_window<int32_t>(p.window), p.causal != 0};
  const uint64_t tail =
      abi::batch_tail_begin(pointer<const int32_t>(args.at[list_tails]), index, of.length);
  work.tail_begin = static_cast<uint32_t>(tail);
  abi::fill_segment(mask, p.segment, p.places, tail);
  // Bounds grow with the token: the first one's begin and the last one's end contain all.
  const int32_t begin = abi::row_bounds<int32_t>(mask, 0, 0, length).begin;
  const int32_t end = abi::row_bounds<int32_t>(mask, mask.tokens - 1, 0, length).end;
  work.begin = static_cast<uint32_t>(begin);
  work.end = static_cast<uint32_t>(end > begin ? end : begin);
  work.shift = cut_shift(params.group, work.length);
  work.group_shift = uint64_t{1} << work.shift > params.group.fewest_keys
                         ? abi::kLargeGroupSplitsShift
                         : abi::kGroupSplitsShift;
  work.first = work.begin >> work.shift;
  const uint32_t behind = (work.end + (1u << work.shift) - 1) >> work.shift;
  work.groups = work.end > work.begin ? behind - work.first : 1;
  return work;
}

struct ScheduleShared {
  uint64_t of_warps[kScheduleThreads / kWarp];
  uint64_t before, share;  // cost of the sequences before the share's first; of a share
  uint64_t items_before;   // of these sequences, of all KV heads
  uint32_t first_sequence;
  uint32_t min_cost, max_cost;  // work item costs of the batch, as far as they fit
};

// Where the next run comes from. Of one warp, all of whose lanes do the same.
struct RunCursor {
  SequenceWork work;
  uint32_t sequence, kv_head, item, group, area;
  uint64_t item_start;  // in cost
};

class Scheduler {
 public:
  Scheduler(const abi::AttentionScheduleParams& params, const Args& args, ScheduleShared& shared)
      : p_(params),
        args_(args),
        shared_(shared),
        sequences_(static_cast<uint32_t>(params.call.table.sequences)) {}

  // Finds the block's share; false: it has none. For all threads together.
  bool find_share() {
    if (threadIdx.x == 0) shared_.min_cost = ~0u, shared_.max_cost = 0;
    __syncthreads();
    uint64_t all = 0;
    for (uint32_t base = 0; base < sequences_; base += kScheduleThreads) {
      const SequenceWork work = work_at(base + threadIdx.x);
      uint64_t of_run = 0;
      scan_block(cost(work), shared_.of_warps, of_run);
      all += of_run;
      if (work.items == 0) continue;
      const uint64_t item = work.item_cost();
      const auto narrow = static_cast<uint32_t>(item < 0xFFFFFFFEu ? item : 0xFFFFFFFEu);
      atomicMin(&shared_.min_cost, narrow);
      atomicMax(&shared_.max_cost, narrow);
    }
    __syncthreads();
    uint64_t share = divide_cost(all + p_.blocks - 1, p_.blocks);
    // Whole work items to a block where that makes a share hardly larger: nothing is merged then.
    if (shared_.min_cost == shared_.max_cost && shared_.max_cost != 0) {
      const uint64_t item = shared_.max_cost, whole = divide_cost(share + item - 1, item) * item;
      if (whole <= share + share / 14) share = whole;
    }
    first_ = blockIdx.x * share, last_ = first_ + share;
    if (first_ >= all) return false;
    uint64_t sum = 0, items = 0;
    for (uint32_t base = 0; base < sequences_ && sum <= first_; base += kScheduleThreads) {
      const SequenceWork work = work_at(base + threadIdx.x);
      const uint64_t sequence_cost = cost(work), kv_heads = p_.call.kv_heads;
      uint64_t of_run = 0, of_items = 0;
      const uint64_t before = sum + scan_block(sequence_cost, shared_.of_warps, of_run);
      const uint64_t items_before =
          items + scan_block(work.items * kv_heads, shared_.of_warps, of_items);
      if (before <= first_ && first_ - before < sequence_cost) {
        shared_.first_sequence = base + threadIdx.x;
        shared_.before = before, shared_.items_before = items_before;
      }
      sum += of_run, items += of_items;
    }
    if (threadIdx.x == 0) shared_.share = share;
    __syncthreads();
    return true;
  }

  // Writes the block's runs. For one warp.
  void write_runs() {
    RunCursor c = seek();
    uint64_t at = first_item_ + blockIdx.x;
    const uint64_t first_run = at;
    for (; c.sequence < sequences_ && c.item_start + c.work.start(c.group) < last_ && at < p_.runs;
         ++at) {
      const uint32_t end = c.work.group_from(last_ - c.item_start);
      const abi::AttentionRun run = describe(c, end);
      if (threadIdx.x == 0) runs(abi::schedule_runs_at(p_.blocks))[at] = run;
      if (threadIdx.x == 0 && at - first_run < abi::kFirstRuns)
        runs(abi::schedule_first_runs_at(
            p_.blocks))[blockIdx.x * abi::kFirstRuns + at - first_run] = run;
      next_item(c);
    }
    write_block(first_run, at - first_run);
  }
  void write_block(uint64_t first_run, uint64_t count) const {
    if (threadIdx.x != 0) return;
    pointer<uint4>(args_.at[list_schedule])[blockIdx.x] = make_uint4(
        p_.key, p_.blocks, static_cast<uint32_t>(first_run), static_cast<uint32_t>(count));
  }

 private:
  abi::AttentionRun* runs(uint64_t word) const {
    return pointer<abi::AttentionRun>(args_.at[list_schedule] + 4 * word);
  }
  SequenceWork work_at(uint32_t sequence) const {
    return sequence < sequences_ ? sequence_work(p_, args_, sequence) : SequenceWork{};
  }
  uint64_t cost(const SequenceWork& work) const {
    return work.items == 0 ? 0 : work.items * p_.call.kv_heads * work.item_cost();
  }

  // The first group that begins in the share.
  RunCursor seek() {
    RunCursor c = {};
    c.sequence = shared_.first_sequence;
    c.work = sequence_work(p_, args_, c.sequence);
    const uint64_t item = divide_cost(first_ - shared_.before, c.work.item_cost());
    first_item_ = shared_.items_before + item;
    c.item_start = shared_.before + item * c.work.item_cost();
    c.kv_head = static_cast<uint32_t>(item) / c.work.items;
    c.item = static_cast<uint32_t>(item) - c.kv_head * c.work.items;
    c.group = c.work.group_from(first_ - c.item_start);
    c.area = static_cast<uint32_t>(divide_cost(c.item_start, shared_.share));
    if (c.group == c.work.groups) next_item(c);
    return c;
  }

  void next_item(RunCursor& c) const {
    c.item_start += c.work.item_cost();
    c.group = 0;
    c.area = blockIdx.x;
    if (++c.item < c.work.items) return;
    c.item = 0;
    if (++c.kv_head < static_cast<uint32_t>(p_.call.kv_heads)) return;
    c.kv_head = 0;
    next_sequence(c);
  }

  // The next one that is this command's, 32 looked at at a time.
  void next_sequence(RunCursor& c) const {
    for (uint32_t base = c.sequence + 1; base < sequences_; base += kWarp) {
      const bool taken = work_at(base + threadIdx.x % kWarp).items != 0;
      const uint32_t found = __ballot_sync(kAll, taken);
      if (found == 0) continue;
      c.sequence = base + static_cast<uint32_t>(__ffs(static_cast<int32_t>(found))) - 1;
      c.work = sequence_work(p_, args_, c.sequence);
      return;
    }
    c.sequence = sequences_;
  }

  // Groups [c.group, end) of the work item.
  abi::AttentionRun describe(const RunCursor& c, uint32_t end) const {
    const SequenceWork& w = c.work;
    const abi::ItemRows rows = abi::item_rows(w.tokens, p_.call.group, p_.rows, c.item);
    const uint32_t shift = w.shift - w.group_shift;  // of a split
    abi::AttentionRun run = {};
    run.sequence = c.sequence, run.kv_head = c.kv_head;
    run.first_row = rows.first, run.rows = rows.count;
    run.first_token = w.first_token, run.tokens = w.tokens;
    run.length = w.length, run.tail_begin = w.tail_begin;
    run.begin = w.begin, run.end = w.end;
    run.item_first = w.begin >> shift;
    const uint32_t behind = (w.end + (1u << shift) - 1) >> shift;
    run.item_end = behind > run.item_first ? behind : run.item_first + 1;
    const uint32_t from = (w.first + c.group) << w.group_shift;
    const uint32_t to = (w.first + end) << w.group_shift;
    run.first = from > run.item_first ? from : run.item_first;
    run.count = (to < run.item_end ? to : run.item_end) - run.first;
    run.area = c.area;
    run.shift = static_cast<uint8_t>(shift);
    run.group_shift = static_cast<uint8_t>(w.group_shift);
    run.valid = w.valid ? 1 : 0;
    return run;
  }

  const abi::AttentionScheduleParams& p_;
  const Args& args_;
  ScheduleShared& shared_;
  uint32_t sequences_;
  uint64_t first_ = 0, last_ = 0;  // of the share, in cost
  uint64_t first_item_ = 0;        // of the share, of all work items
};

__global__ void __launch_bounds__(kScheduleThreads)
    attention_schedule(const abi::AttentionScheduleParams p, const Args args) {
  __shared__ ScheduleShared shared;
  pdl_wait();
  pdl_launch_dependents();
  Scheduler scheduler(p, args, shared);
  const bool any = scheduler.find_share();
  if (threadIdx.x >= kWarp) return;
  if (any) {
    scheduler.write_runs();
  } else {
    scheduler.write_block(0, 0);
  }
}

}  // namespace gyre::cuda
