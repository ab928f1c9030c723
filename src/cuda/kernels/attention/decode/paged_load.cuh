#pragma once
// Decode attention over pages: the splits that a warp takes, and their loads, which run ahead of
// what it computes, from split to split. Entries of the page table are read a window of up to 32
// pages ahead.
#include "cuda/kernels/attention/decode/kv_load.cuh"
#include "cuda/kernels/attention/decode/paged_block.cuh"

namespace gyre::cuda {

// The addresses that do not change from stage to stage, in registers or computed again.
template <class Traits, bool kKept = !Traits::kFewRegisters>
struct StageAddresses {
  StageLoad<Traits> load;

  StageAddresses(const abi::AttentionParams& p, const Args& args, uint32_t slice)
      : load(p, args, 0, slice) {}
  const StageLoad<Traits>& get() const { return load; }
};
template <class Traits>
struct StageAddresses<Traits, false> {
  const abi::AttentionParams& p;
  const Args& args;
  uint32_t slice;

  StageAddresses(const abi::AttentionParams& params, const Args& arguments, uint32_t of_warp)
      : p(params), args(arguments), slice(of_warp) {}
  StageLoad<Traits> get() const { return StageLoad<Traits>(p, args, 0, slice); }
};

// kOnePage: pages are a multiple of a stage, so that every stage lies in one of them.
template <class Traits, bool kOnePage>
class SplitLoads {
  static constexpr uint32_t kKeys = Traits::kStage.keys, kTiles = Traits::kTiles;
  static constexpr uint32_t kPerKey = Traits::kWarpsPerKey;

 public:
  SplitLoads(const abi::AttentionParams& p, const Args& args, PagedState& state, uint32_t warp)
      : p_(p),
        args_(args),
        state_(state),
        warp_(warp),
        page_tiles_(p.table.page_tokens / abi::kKvTile),
        addresses_(p, args, warp % kPerKey) {}

  // Begins with the warp's first split of the runs at hand.
  void start() {
    const uint32_t first = warp_ / kPerKey;
    next_split_ = first < state_.takers ? first : state_.splits;
    run_ = left_ = 0;
    now_ = next_ = {};
    find_window();
  }

  // How many of the next `wanted` stages issue() may be called for, before it is asked again: of
  // one window, or, behind the last split, all. Apart from issue(): it is seldom needed, and the
  // loop over stages should be small.
  uint32_t prepare(uint32_t wanted) {
    if (now_.stages == 0) take_window();
    if (now_.stages == 0) return wanted;
    const uint32_t count = wanted < now_.stages ? wanted : now_.stages;
    now_.stages -= count;
    return count;
  }

  // Whether the next stage, after prepare(), has no keys of the queries' own tokens.
  bool is_settled() const {
    return now_.last_key == 0 || now_.tile * abi::kKvTile + kKeys <= now_.settled;
  }

  // Issues the loads of the next stage, if it has keys.
  void issue(unsigned char* to) {
    if (now_.last_key == 0) {
      copy_commit();
      return;
    }
    const uint32_t at = now_.tile + lane() % kTiles;
    const uint32_t page = page_of(at);
    const uint32_t number =
        __shfl_sync(kAll, now_.entry, static_cast<int>((page - now_.page) % kWarp));
    const PageTiles pages = {now_.head, static_cast<uint32_t>(p_.table.page_stride), number,
                             at - page * page_tiles_};
    const uint32_t first = now_.tile * abi::kKvTile;
    const bool whole =
        Traits::kLevelsV || (first >= now_.first_key && first + kKeys <= now_.last_key);
    addresses_.get().template start<kOnePage>(pages, whole, now_.first_key, now_.last_key, first,
                                              to);
    now_.tile += kTiles;
  }

  // The split that comes after those that were taken; null: none.
  const QueuedSplit* take() {
    if (taken_ == queued_) return nullptr;
    __syncwarp();
    return &state_.queue[warp_][taken_++ % kQueuedSplits];
  }

 private:
  // Stages whose entries a warp holds, a lane for each page.
  struct Window {
    uint32_t tile, stages;         // the next stage's first tile, of the sequence
    uint32_t page, entry;          // lane 0's page of the sequence; the lane's entry
    uint32_t first_key, last_key;  // of the split; last_key 0: it has no keys
    uint32_t settled;              // keys of the sequence before the queries' own
    uint64_t head;                 // bytes from the first KV head to this one
    uint32_t queued;               // the split's number in the queue
  };

  static uint32_t lane() { return threadIdx.x % kWarp; }
  uint32_t page_of(uint32_t tile) const {
    return page_tiles_ == 1 ? tile : __umulhi(tile, p_.table.page_inverse);
  }

  void take_window() {
    now_ = next_;
    if (now_.stages == 0) {
      now_.last_key = 0;
      return;
    }
    const bool unknown = now_.entry >= static_cast<uint32_t>(p_.table.pages);
    if (unknown) {
      now_.entry = 0;
      if (now_.last_key != 0) state_.queue[warp_][now_.queued % kQueuedSplits].invalid = 1;
    }
    find_window();
  }

  // What follows `next_`: the rest of its split, or another split.
  void find_window() {
    if (left_ != 0) {
      next_.tile += next_.stages * kTiles;
    } else if (!find_split()) {
      next_.stages = 0;
      return;
    }
    // As many stages as lie in 32 pages.
    next_.page = page_of(next_.tile);
    const uint32_t fit = (kWarp * page_tiles_ - (next_.tile - next_.page * page_tiles_)) / kTiles;
    next_.stages = left_ < fit ? left_ : fit;
    left_ -= next_.stages;
    next_.entry = 0;
    if (next_.last_key == 0) return;
    // Entries of pages that no key is read from are stale.
    const uint32_t oldest = page_of(next_.first_key / abi::kKvTile);
    const uint32_t newest = page_of((next_.last_key - 1) / abi::kKvTile);
    uint32_t page = next_.page + lane();
    page = page < oldest ? oldest : (page > newest ? newest : page);
    if (p_.table.ring_entries != 0) page %= p_.table.ring_entries;
    const abi::AttentionRun& run = state_.runs[run_];
    next_.entry = pointer<const uint32_t>(
        args_.at[arg_table])[run.sequence * p_.table.stride + p_.table.first_entry + page];
  }

  bool find_split() {
    if (next_split_ >= state_.splits) return false;
    while (next_split_ >= state_.before[run_] + state_.runs[run_].count) ++run_;
    const abi::AttentionRun& run = state_.runs[run_];
    const uint32_t nth = next_split_ - state_.before[run_];
    const VisibleKeys keys = visible_keys(p_, run, run.first + nth, kKeys);
    next_.first_key = keys.first, next_.last_key = keys.count == 0 ? 0 : keys.first + keys.count;
    next_.head = run.kv_head * p_.k.codes_head_stride;
    next_.settled = run.length > run.tokens ? run.length - run.tokens : 0;
    next_.queued = queued_;
    const uint32_t base = keys.first / kKeys * kKeys;
    const uint32_t stages = (keys.first - base + keys.count + kKeys - 1) / kKeys;
    next_.tile = base / abi::kKvTile;
    left_ = keys.count == 0 ? 1 : stages;
    if (lane() == 0)
      state_.queue[warp_][queued_ % kQueuedSplits] = {
          run_, nth, base, keys.first - base, keys.count, keys.common, 0, left_};
    ++queued_;
    // Warps that share keys take splits in turn, all others whatever comes next.
    if constexpr (kPerKey > 1) {
      next_split_ += blockDim.x / (kWarp * kPerKey);
    } else {
      uint32_t taken = 0;
      if (lane() == 0) taken = atomicAdd(&state_.next, 1u);
      next_split_ = __shfl_sync(kAll, taken, 0);
    }
    return true;
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  PagedState& state_;
  uint32_t warp_, page_tiles_;
  StageAddresses<Traits> addresses_;
  uint32_t next_split_ = 0, run_ = 0;  // to be described, of the block's
  uint32_t left_ = 0;                  // stages of the described split behind `next_`
  uint32_t queued_ = 0, taken_ = 0;
  Window now_ = {}, next_ = {};
};

}  // namespace gyre::cuda
