#pragma once
// Attention of a few rows of each of several sequences, whose keys lie in pages. A block for each
// multiprocessor takes its runs from the step schedule (abi/attention_schedule.h). A split of a
// run's keys is one warp's, from its loads to its sums; above head_dim 256 four warps share it. The
// states of splits are folded in the order of their keys, in shared memory, or in global memory
// where a work item's groups lie in several blocks: the last block to arrive merges those.
// Bytes moved: K and V once, q, and one state for each group of a work item in several blocks.
#include "cuda/kernels/attention/decode/decode_loop.cuh"
#include "cuda/kernels/attention/decode/paged_load.cuh"
#include "cuda/kernels/attention/decode/split_fold.cuh"
#include "cuda/kernels/block_shared.cuh"

namespace gyre::cuda {

template <class Traits, bool kOnePage>
class PagedBlock {
  static constexpr PagedLayout kLayout =
      paged_layout(Traits::kK, Traits::kV, Traits::kDims, Traits::kRows);
  static constexpr uint32_t kStages = kLayout.stages, kStageBytes = Traits::kStage.bytes;
  static constexpr uint32_t kKeys = Traits::kStage.keys;
  static constexpr uint32_t kPerKey = Traits::kWarpsPerKey, kRows = Traits::kRows;
  static constexpr uint32_t kAhead = 2;  // work items whose queries are made early
  // A warp has a split for each stage, one that is described and one that it claimed.
  static_assert((kLayout.max_warps / kPerKey - 1) * (kStages + 2) <= kTurns);
  using Set = RowSet<Traits>;
  static constexpr uint32_t kFoldBytes = fold_bytes(Traits::kV, Traits::kDims, kRows);

 public:
  PagedBlock(const abi::AttentionParams& p, const Args& args, const EarlyBits& early,
             unsigned char* shared)
      : p_(p),
        args_(args),
        early_(early),
        shared_(shared),
        state_(*reinterpret_cast<PagedState*>(shared)),
        warp_(warp_index()),
        warp_memory_(shared + kLayout.warps_at(blockDim.x / kWarp) + warp_ * kLayout.warp_bytes),
        slots_(shared + kLayout.slots_at(blockDim.x / kWarp)),
        loads_(p, args, state_, warp_) {}

  // All runs of the block, as many at a time as there are slots for their work items.
  void run() {
    if (threadIdx.x == 0) {
      state_.table_k[0] = state_.table_k[1] = level_table<Traits::kK, Traits::kManyRows>();
      state_.table_v[0] = state_.table_v[1] = level_table<Traits::kV, Traits::kManyRows>();
    }
    // Before the command ahead has ended: what it does not write.
    constexpr uint32_t kLists = 1u << arg_schedule | 1u << arg_table;
    constexpr uint32_t kKeyArgs =
        1u << arg_k_codes | 1u << arg_k_scales | 1u << arg_v_codes | 1u << arg_v_scales;
    waited_ = (early_.early & kLists) != kLists;
    early_keys_ = !waited_ && p_.settled_keys != 0 && (early_.early_old & kKeyArgs) == kKeyArgs;
    if (waited_) {
      pdl_wait();
    } else {
      pdl_read_early();
    }
    const uint4 header = pointer<const uint4>(args_.at[arg_schedule])[blockIdx.x];
    static_assert(kMaxItemSlots <= abi::kFirstRuns);
    copy_runs(
        abi::schedule_first_runs_at(gridDim.x) + blockIdx.x * abi::kFirstRuns * abi::kRunWords,
        kMaxItemSlots);
    const uint32_t slots = kLayout.slots(blockDim.x / kWarp, dynamic_shared_bytes());
    // A schedule of something else: nothing that it says may be used.
    const uint32_t count = header.x == p_.schedule_key && header.y == gridDim.x ? header.w : 0;
    for (uint32_t done = 0; done < count; done += slots) {
      if (done != 0) __syncthreads();
      init_barriers(slots, done != 0);
      const uint32_t left = count - done, here = left < slots ? left : slots;
      if (done != 0)
        copy_runs(abi::schedule_runs_at(gridDim.x) + uint64_t{header.z + done} * abi::kRunWords,
                  here);
      count_splits(here);
      work();
      if (left <= slots) pdl_launch_dependents();
      __syncthreads();
      merge_items();
      write_items();
    }
    if (!waited_) pdl_wait();
  }

 private:
  static uint32_t lane() { return threadIdx.x % kWarp; }
  static uint32_t slice() { return warp_index() % kPerKey; }
  unsigned char* slot(uint32_t run) const { return slots_ + run * kLayout.slot.bytes; }
  unsigned char* ring() const { return warp_memory_ + kLayout.ring; }
  RowFactors& factors(uint32_t run) const {
    return *reinterpret_cast<RowFactors*>(slot(run) + kLayout.slot.factors);
  }
  MaskRow* masks(uint32_t run) const {
    return reinterpret_cast<MaskRow*>(slot(run) + kLayout.slot.masks);
  }
  // Folds of a group and of the work item.
  unsigned char* group_fold(uint32_t run, uint32_t set) const {
    return slot(run) + kLayout.slot.group + (slice() * Set::kSets + set) * Set::kSetBytes;
  }
  unsigned char* item_fold(uint32_t run, uint32_t set) const {
    return slot(run) + kLayout.slot.item + (slice() * Set::kSets + set) * Set::kSetBytes;
  }

  // A split's set is folded when the one before it is: barriers of splits modulo kTurns.
  PhaseBarrier* turns(uint32_t run, uint32_t set) const {
    return reinterpret_cast<PhaseBarrier*>(slot(run) + kLayout.slot.turns) +
           (slice() * Set::kSets + set) * kTurns;
  }

  void init_barriers(uint32_t slots, bool again) {
    const auto init = [again](PhaseBarrier* barrier, uint32_t count) {
      if (again) invalidate_barrier(barrier);
      init_barrier(barrier, count);
    };
    static_assert(sizeof(PhaseBarrier) == kBarrierBytes);
    constexpr uint32_t kOfSlot = kPerKey * Set::kSets * kTurns;
    for (uint32_t i = threadIdx.x; i < slots * kOfSlot; i += blockDim.x)
      init(reinterpret_cast<PhaseBarrier*>(slot(i / kOfSlot) + kLayout.slot.turns) + i % kOfSlot,
           kWarpArrivals);
    if (threadIdx.x < kMaxItemSlots) init(&state_.ready[threadIdx.x], kRows * kWarpArrivals);
  }

  // Copies descriptions of runs, at a word of the schedule, to shared memory.
  void copy_runs(uint64_t at, uint32_t count) {
    const auto* const from = pointer<const uint32_t>(args_.at[arg_schedule]) + at;
    auto* const to = reinterpret_cast<uint32_t*>(state_.runs);
    for (uint32_t i = threadIdx.x; i < count * abi::kRunWords; i += blockDim.x) to[i] = from[i];
  }
  // For all threads together.
  void count_splits(uint32_t count) {
    __syncthreads();
    if (warp_ == 0) sum_splits(count);
    __syncthreads();
  }
  void sum_splits(uint32_t count) {
    const uint32_t own = lane() < count ? state_.runs[lane()].count : 0, sum = scan_warp(own);
    static_assert(kMaxItemSlots <= kWarp);
    if (lane() < count) state_.before[lane()] = sum - own;
    if (lane() == kWarp - 1) state_.begin(count, sum, blockDim.x / (kWarp * kPerKey), kPerKey == 1);
  }

  void wait() { pdl_wait(), waited_ = true; }

  // Until no split of the runs at hand is left.
  void work() {
    const uint32_t ahead = kAhead < state_.count ? kAhead : state_.count;
    // Queries first, if they are there: a load queued behind a block's keys takes microseconds.
    QueryBits<Traits> bits;
    const bool first = waited_;
    const auto load_first = [&] {
      if (warp_ < ahead * kRows) load_row(warp_ / kRows, warp_ % kRows, bits);
    };
    if (first) load_first();
    loads_.start();
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < kStages; ++i) {
      loads_.prepare(1);
      if (!waited_ && (!early_keys_ || !loads_.is_settled())) wait();
      loads_.issue(ring() + i * kStageBytes);
    }
    if (!waited_) wait();
    if (!first) load_first();
    make_queries(0, warp_, blockDim.x / kWarp, ahead * kRows, bits);
    DecodeProblem problem = {};
    problem.plain_logits = p_.soft_cap == 0 && args_.at[arg_alibi_slopes] == 0;
    problem.rows = 1;
    WarpLoop<Traits> loop(p_, problem, masks(0), state_.table_k, state_.table_v,
                          reinterpret_cast<float*>(warp_memory_ + kLayout.transpose),
                          reinterpret_cast<float*>(shared_ + kPagedStateBytes), warp_,
                          Queries<Traits>());
    uint32_t at = 0, before = (kStages - 1) * kStageBytes, index = 0, queried = ~0u;
#pragma unroll 1
    for (const QueuedSplit* split = loads_.take(); split != nullptr; split = loads_.take()) {
      const uint32_t number = split->run;
      const abi::AttentionRun& run = state_.runs[number];
      make_queries_ahead(number, split->nth, run.count);
      if (number != queried) {
        queried = number;
        wait_for_phase(&state_.ready[number], 0);
        loop.queries = Queries<Traits>(slot(number), factors(number), slice(), run.rows);
        loop.mask = masks(number);
        problem.rows = run.rows;
      }
      problem.common = split->common;
      problem.walk = split_walk(split->skip, split->count, kKeys);
      problem.walk_first = split->base + split->skip - run.begin;
      loop.lane = lane_weights();
      loop.until_check = kStagesToCheck;
      ValueSums<Traits> sums = ValueSums<Traits>::none();
      const uint32_t stages = split->stages;
#pragma unroll 1
      for (uint32_t stage = 0, end = 0; stage < stages;) {
        end = stage + loads_.prepare(stages - stage);
#pragma unroll 1
        for (; stage < end; ++stage) {
          wait_for_stage<kStages>();
          loads_.issue(ring() + before);
          const unsigned char* const bytes = ring() + at;
          before = at;
          at = at + kStageBytes == kStages * kStageBytes ? 0 : at + kStageBytes;
          if (problem.walk.tiles == 0) continue;
          typename SpreadV<Traits>::Scores x;
          loop.logits(bytes, index++, stage * kKeys, x);
          loop.add(bytes, x, sums);
        }
      }
      finish_split(number, split->nth,
                   split->invalid != 0 || run.valid == 0 || state_.stale[number] != 0, loop.lane,
                   sums);
    }
    copy_wait<0>();
  }

  // The queries of the work item kAhead further on, by the warps that take a work item's first
  // splits.
  void make_queries_ahead(uint32_t number, uint32_t nth, uint32_t splits) {
    const uint32_t item = number + kAhead, warps = splits < kRows ? splits : kRows;
    if (item >= state_.count || nth >= warps || slice() != 0) return;
    QueryBits<Traits> bits;
    load_row(item, nth, bits);
    make_queries(item, nth, warps, kRows, bits);
  }
  // Queries from, from + step, ... below end of the work items from `work item` on; `bits` of the
  // first.
  void make_queries(uint32_t item, uint32_t from, uint32_t step, uint32_t end,
                    QueryBits<Traits>& bits) {
#pragma unroll 1
    for (uint32_t i = from; i < end; i += step) {
      QueryBits<Traits> next;
      if (i + step < end) load_row(item + (i + step) / kRows, (i + step) % kRows, next);
      make_query(item + i / kRows, i % kRows, bits);
#pragma unroll
      for (uint32_t e = 0; e < Traits::kQueryDim / kWarp; ++e) bits[e] = next[e];
    }
  }

  // Row r of a work item's queries; rows behind the last repeat others over 16-bit keys.
  uint32_t query_row(const abi::AttentionRun& run, uint32_t r) const {
    return Traits::kLevelsK ? r : r % run.rows;
  }
  void load_row(uint32_t number, uint32_t r, QueryBits<Traits>& bits) const {
    const abi::AttentionRun& run = state_.runs[number];
    const uint64_t q = args_.at[arg_q] + run.first_token * p_.q_token_stride;
    const uint32_t of = query_row(run, r);
    if (of < run.rows)
      load_query<Traits>(query_address(p_, item_problem(p_, args_, run), q, of), p_.q_dtype == 0,
                         bits);
  }
  // To operands; rows behind the last are zeros over levels. By one warp.
  void make_query(uint32_t number, uint32_t r, const QueryBits<Traits>& bits) {
    const abi::AttentionRun& run = state_.runs[number];
    const DecodeProblem item = item_problem(p_, args_, run);
    auto* const row = reinterpret_cast<float*>(warp_memory_);
    const bool present = query_row(run, r) < run.rows;
#pragma unroll
    for (uint32_t part = 0; part < Traits::kQueryParts; ++part) {
      if (present) stage_query<Traits>(p_, item, bits, part, row, r, factors(number));
      __syncwarp();
      if constexpr (Traits::kStage.k_tiles) {
        write_query_slots<Traits>(present ? row : nullptr, r,
                                  reinterpret_cast<uint2*>(slot(number)), factors(number));
      } else if constexpr (Traits::kLevelsK) {
        write_query_columns<Traits>(present ? row : nullptr, r, part,
                                    reinterpret_cast<uint2*>(slot(number)), factors(number));
      } else {
        write_query_row<Traits>(row, r, reinterpret_cast<uint4*>(slot(number)));
      }
    }
    if (lane() == 0 && r == 0) state_.stale[number] = is_stale(args_, run) ? 1 : 0;
    if (lane() == 0 && present && r < run.rows)
      masks(number)[r] = mask_row(item, args_.at[arg_alibi_slopes], r);
    arrive_warp(&state_.ready[number]);
  }

  // Folds a split into its group, a group into its work item: a set of rows waits for that of the
  // split before. What does not need it is done ahead.
  void finish_split(uint32_t number, uint32_t nth, bool invalid, const LaneWeights& lane_weights,
                    const ValueSums<Traits>& sums) {
    const abi::AttentionRun& run = state_.runs[number];
    const uint32_t split = run.first + nth;
    const bool from_first = run.first == run.item_first, last = nth + 1 == run.count;
    const uint32_t shift = run.group_shift, in_group = split & ((1u << shift) - 1);
    const bool begins = in_group == 0 || split == run.item_first;
    const bool ends = in_group + 1 == 1u << shift || split + 1 == run.item_end;
    const uint32_t group = (split >> shift) - (run.item_first >> shift);
#pragma unroll 1
    for (uint32_t set = 0; set < Set::kSets; ++set) {
      Set fold;
      set_of(fold, lane_weights, sums, set, invalid);
      PhaseBarrier* const turn = turns(number, set);
      if (nth != 0) wait_for_phase(&turn[(nth - 1) % kTurns], (nth - 1) / kTurns % 2);
      if (!begins) fold.follow(group_fold(number, set));
      if (!ends) {
        fold.put(group_fold(number, set));
      } else {
        if (from_first && group != 0) fold.follow(item_fold(number, set));
        if (!from_first) {
          fold.put(state_at(run, group, set));
        } else if (!last) {
          fold.put(item_fold(number, set));
        } else if (run.count == run.item_end - run.item_first) {
          finish_set(number, set, fold);
        } else {
          fold.put(state_at(run, 0, set));
        }
      }
      if (!last) arrive_warp(&turn[nth % kTurns]);
    }
  }
  // Sums of a set: an index that the compiler knows keeps them in registers.
  template <uint32_t kSet = 0>
  static void set_of(Set& to, const LaneWeights& lane_weights, const ValueSums<Traits>& sums,
                     uint32_t set, bool invalid) {
    if (set == kSet) {
      to.set(lane_weights, sums, kSet, invalid);
    } else if constexpr (kSet + 1 < Set::kSets) {
      set_of<kSet + 1>(to, lane_weights, sums, set, invalid);
    }
  }

  // The fold of a group of a work item in several blocks; of the first block's groups at 0.
  unsigned char* state_at(const abi::AttentionRun& run, uint32_t group, uint32_t set) const {
    constexpr uint64_t kArea = paged_area_bytes(Traits::kV, Traits::kDims, kRows);
    return pointer<unsigned char>(args_.at[arg_partial] + paged_counter_bytes(gridDim.x) +
                                  run.area * kArea) +
           uint64_t{group} * kFoldBytes + (slice() * Set::kSets + set) * Set::kSetBytes;
  }

  // Rows of a work item that has all of its keys, for write_items.
  void finish_set(uint32_t number, uint32_t set, const Set& fold) {
    __syncwarp();
    fold.put_rows(item_fold(number, set));
    fold.put_states(row_states(number, slice()) + set * Set::kSetRows);
    if (lane() == 0) atomicOr(&state_.finished, 1u << number);
  }
  SoftmaxState* row_states(uint32_t run, uint32_t of_slice) const {
    static_assert(sizeof(SoftmaxState) == kStateBytes);
    return reinterpret_cast<SoftmaxState*>(slot(run) + kLayout.slot.states) + of_slice * kRows;
  }
  // Finished rows, out of the rotated domain: all warps take some.
  void write_items() {
    constexpr uint32_t kParts = Traits::kRowParts, kTasks = kRows * kParts;
    const uint32_t finished = state_.finished, tasks = state_.count * kTasks;
#pragma unroll 1
    for (uint32_t i = warp_; i < tasks; i += blockDim.x / kWarp) {
      const uint32_t number = i / kTasks, row = i % kTasks / kParts;
      if ((finished >> number & 1) == 0 || row >= state_.runs[number].rows) continue;
      write_row(number, row, i % kParts);
    }
  }
  void write_row(uint32_t number, uint32_t row, uint32_t part) {
    constexpr uint32_t kDim = Traits::kRowDim;
    const SoftmaxState* const states = row_states(number, 0);
    float x[kDim / kWarp];
    Set::read_row(slot(number) + kLayout.slot.item, states, row, x);
    RowTarget target = item_row_target<Traits>(p_, state_.runs[number], args_, row);
    store_row<Traits>(target, p_.partial == abi::kAttentionStates, part, states[row], x);
  }

  // Work items of several blocks: only the first and the last run of those at hand can be of one.
  void merge_items() {
    if (state_.runs[0].first != state_.runs[0].item_first) merge_item(0);
    const uint32_t last = state_.count - 1;
    const abi::AttentionRun& run = state_.runs[last];
    if (run.first == run.item_first && run.count != run.item_end - run.item_first) merge_item(last);
  }

  // The last block to count its groups folds them all, in their order. For all threads together.
  void merge_item(uint32_t number) {
    const abi::AttentionRun& run = state_.runs[number];
    const RunGroups of(run);
    if (threadIdx.x == 0)
      state_.merge_groups = count_groups(args_.at[arg_partial] + run.area * 4, of);
    __syncthreads();
    const uint32_t done = state_.merge_groups;
    if (done != 0)
      fold_groups<Traits>(reinterpret_cast<const float4*>(state_at(run, 0, 0) -
                                                          slice() * Set::kSets * Set::kSetBytes),
                          reinterpret_cast<float4*>(slot(number) + kLayout.slot.item), done,
                          of.all);
    __syncthreads();
    if (done == 0) return;
#pragma unroll 1
    for (uint32_t set = warp_ / kPerKey; set < Set::kSets; set += blockDim.x / (kWarp * kPerKey)) {
      Set fold;
      fold.get(item_fold(number, set));
      finish_set(number, set, fold);
    }
    __syncthreads();
  }
  const abi::AttentionParams& p_;
  const Args& args_;
  const EarlyBits& early_;
  unsigned char* shared_;
  PagedState& state_;
  uint32_t warp_;
  unsigned char *warp_memory_, *slots_;  // the warp's buffers; those of work items
  bool waited_ = false, early_keys_ = false;
  SplitLoads<Traits, kOnePage> loads_;
};

}  // namespace gyre::cuda
