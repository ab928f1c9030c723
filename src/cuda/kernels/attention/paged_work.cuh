#pragma once
// Decode attention over pages: how the work of a batch is shared. A unit is one sequence, one KV
// head and as many of its rows as a block takes; an item is one piece of a unit's keys. Items are
// ordered by sequence, KV head, rows and piece, and every block takes an equal run of them, by
// their cost in keys. All of it is computed on the device, by each block for itself.
#include "cuda/kernels/attention/block_scan.cuh"
#include "cuda/kernels/attention/problem.cuh"

namespace gyre::cuda {

// What a unit and an item cost beside their keys, in keys.
constexpr uint32_t kUnitCost = 128, kItemCost = 64;

// A sequence of the batch, and the work with it.
struct SequenceWork {
  uint32_t first_token, tokens;  // rows of q
  abi::RowMask<int32_t> mask;
  bool valid;
  uint32_t begin, end;            // keys that some query sees
  uint32_t shift, first, pieces;  // pieces of 1 << shift keys; at least one
  uint32_t groups;                // units of a KV head; 0: another command's, or nothing to do

  // Where piece i begins in the cost of its unit.
  constexpr uint64_t start(uint32_t i) const {
    if (i == 0) return 0;
    const uint64_t key = static_cast<uint64_t>(first + i) << shift;
    return kUnitCost + key - begin + uint64_t{i} * kItemCost;
  }
  // The first piece that begins at `into` or later; `pieces`: none does.
  constexpr uint32_t piece_from(uint64_t into) const {
    if (into == 0) return 0;
    const uint64_t second = start(1), each = (uint64_t{1} << shift) + kItemCost;
    const uint64_t piece = into <= second ? 1 : 1 + (into - second + each - 1) / each;
    return piece < pieces ? static_cast<uint32_t>(piece) : pieces;
  }
  constexpr uint64_t unit_cost() const {
    return kUnitCost + uint64_t{end - begin} + uint64_t{pieces} * kItemCost;
  }
};

// Rows of a unit. 16-bit values of a key that one token sees and another does not could be NaN:
// over these a unit has rows of one token only.
struct UnitRows {
  uint32_t first, count;
};
template <class Traits>
constexpr uint32_t unit_groups(uint32_t tokens, uint32_t group) {
  constexpr uint32_t kRows = Traits::kRows;
  if (Traits::kLevelsV) return (tokens * group + kRows - 1) / kRows;
  return tokens * ((group + kRows - 1) / kRows);
}
template <class Traits>
constexpr UnitRows unit_rows(uint32_t tokens, uint32_t group, uint32_t index) {
  constexpr uint32_t kRows = Traits::kRows;
  uint32_t first = index * kRows, end = tokens * group;
  if (!Traits::kLevelsV) {
    const uint32_t each = (group + kRows - 1) / kRows, token = index / each;
    first = token * group + (index - token * each) * kRows;
    end = (token + 1) * group;
  }
  return {first, end - first < kRows ? end - first : kRows};
}

template <class Traits>
inline SequenceWork sequence_work(const abi::AttentionParams& p, const Args& args, uint32_t index) {
  const auto* const begins = pointer<const int32_t>(args.at[arg_query_begin]);
  const bool prompt =
      args.at[arg_prompts] != 0 && pointer<const uint8_t>(args.at[arg_prompts])[index] != 0;
  const abi::BatchSequence of =
      abi::batch_sequence(p.table, p.tokens, begins[index], begins[index + 1],
                          pointer<const int32_t>(args.at[arg_lengths])[index]);
  SequenceWork work = {};
  work.first_token = static_cast<uint32_t>(of.first_token);
  work.tokens = static_cast<uint32_t>(of.tokens);
  work.valid = of.valid;
  if (of.tokens != 0 && abi::attention_takes(p.phase, of.tokens, p.group, prompt))
    work.groups = unit_groups<Traits>(work.tokens, p.group);
  const auto length = static_cast<int32_t>(of.length);
  work.mask = {length, static_cast<int32_t>(work.tokens), abi::row_window<int32_t>(p.window),
               p.causal != 0};
  abi::fill_segment(
      work.mask, p.segment, p.places,
      abi::batch_tail_begin(pointer<const int32_t>(args.at[arg_tail_begin]), index, of.length));
  // Bounds grow with the token: the first one's begin and the last one's end contain all.
  const int32_t begin = abi::row_bounds<int32_t>(work.mask, 0, 0, length).begin;
  const int32_t end = abi::row_bounds<int32_t>(work.mask, work.mask.tokens - 1, 0, length).end;
  work.begin = static_cast<uint32_t>(begin);
  work.end = static_cast<uint32_t>(end > begin ? end : begin);
  work.shift = piece_shift(decode_cut(Traits::kValueDim), static_cast<uint32_t>(length));
  work.first = work.begin >> work.shift;
  const uint32_t behind = (work.end + (1u << work.shift) - 1) >> work.shift;
  work.pieces = work.end > work.begin ? behind - work.first : 1;
  return work;
}

// One piece of a unit's keys. Positions are slots of its stages, which begin at multiples of a
// stage; keys that some row of the unit sees are at [skip, skip + count).
struct PagedItem {
  uint32_t end;                  // 1: there is none
  uint32_t new_unit, ends_unit;  // the first of the unit in this block; the last of the unit
  uint32_t sequence, kv_head, first_token;
  uint32_t first_row, rows;
  abi::RowMask<int32_t> mask;
  uint32_t origin;  // the sequence's oldest key that is seen
  uint32_t base, skip, count;
  uint32_t rounds;         // stages that each warp has, at least one
  uint32_t uniform;        // all rows see the same of these keys
  uint32_t piece, pieces;  // of the unit
  uint32_t begun;          // first of its pieces that this block has
  uint32_t area;           // block that has the unit's first piece
  uint32_t bad;            // 1: no rows to read, or a page that is none: rows become NaN
};
// While an item is computed, loads are up to three stages ahead and table entries four: as many
// items, where each is one stage. One more is made meanwhile.
constexpr uint32_t kItemSlots = 8, kItemsAhead = 5;
static_assert(kItemsAhead > kDecodeMostStages && kItemsAhead < kItemSlots);

// Where the next item comes from. Of one warp, all of whose lanes do the same.
struct PagedCursor {
  SequenceWork work;
  uint32_t sequence, kv_head, group, piece, begun, area;
  uint64_t unit_start;   // in cost
  uint64_t share, last;  // cost of every block's share, where this block's ends
};

// In shared memory, behind BlockState.
struct PagedState {
  PagedItem items[kItemSlots];
  PagedCursor cursor;
  uint64_t of_warps[kDecodeMostWarps];
  uint64_t before;                   // cost of the sequences before the block's first
  float2 fold[kDecodeMostRows * 4];  // {max, sum} of each piece of 128 coordinates of a row
  uint32_t first_sequence;
  uint32_t last_to_come;  // this block folds a unit's pieces

  PagedItem& item(uint32_t i) { return items[i % kItemSlots]; }
};
static_assert(sizeof(PagedState) <= kPagedStateBytes);

// 32 bits where they are enough: a 64-bit division takes ten times as long.
inline uint64_t divide_cost(uint64_t a, uint64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

template <class Traits>
class PagedWork {
 public:
  PagedWork(const abi::AttentionParams& p, const Args& args, PagedState& state)
      : p_(p), args_(args), state_(state), sequences_(static_cast<uint32_t>(p.table.sequences)) {}

  // Finds the block's share; false: it has none. For all threads together.
  bool start() {
    uint64_t all = 0, mine = 0, before = 0;
    for (uint32_t base = 0; base < sequences_; base += blockDim.x) {
      uint64_t of_run = 0;
      mine = cost(base + threadIdx.x);
      before = all + scan_block(mine, state_.of_warps, of_run);
      all += of_run;
    }
    const uint64_t share = divide_cost(all + gridDim.x - 1, gridDim.x), first = blockIdx.x * share;
    if (first >= all) return false;
    uint64_t sum = 0;
    for (uint32_t base = 0; base < sequences_; base += blockDim.x) {
      if (sequences_ > blockDim.x) {
        uint64_t of_run = 0;
        mine = cost(base + threadIdx.x);
        before = sum + scan_block(mine, state_.of_warps, of_run);
        sum += of_run;
      }
      if (before <= first && first - before < mine) {
        state_.first_sequence = base + threadIdx.x, state_.before = before;
        state_.cursor.share = share;
      }
      if (sequences_ > blockDim.x && sum > first) break;
    }
    __syncthreads();
    return true;
  }

  // Sets the cursor to the first item that begins in the share.
  void seek() {
    PagedCursor c = state_.cursor;
    c.sequence = state_.first_sequence;
    c.work = sequence_work<Traits>(p_, args_, c.sequence);
    const uint64_t first = blockIdx.x * c.share, into = first - state_.before;
    const uint64_t unit = divide_cost(into, c.work.unit_cost());
    c.last = first + c.share;
    c.unit_start = state_.before + unit * c.work.unit_cost();
    c.kv_head = static_cast<uint32_t>(unit) / c.work.groups;
    c.group = static_cast<uint32_t>(unit) - c.kv_head * c.work.groups;
    c.piece = c.work.piece_from(first - c.unit_start);
    c.area = static_cast<uint32_t>(divide_cost(c.unit_start, c.share));
    c.begun = c.piece;
    if (c.piece == c.work.pieces) next_unit(c);
    put(c);
  }

  // The next item; the cursor moves on.
  void produce(uint32_t index) {
    PagedCursor c = state_.cursor;
    PagedItem item = {};
    item.end = 1;
    const bool more = c.sequence < sequences_ && c.unit_start + c.work.start(c.piece) < c.last;
    if (more) {
      describe(c, item);
      if (++c.piece == c.work.pieces) next_unit(c);
    }
    if (threadIdx.x % kWarp == 0) state_.item(index) = item;
    if (more) put(c);
  }

 private:
  uint64_t cost(uint32_t sequence) const {
    if (sequence >= sequences_) return 0;
    const SequenceWork work = sequence_work<Traits>(p_, args_, sequence);
    return work.groups * p_.kv_heads * work.unit_cost();
  }

  void put(const PagedCursor& c) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) state_.cursor = c;
    __syncwarp();
  }

  void next_unit(PagedCursor& c) {
    c.unit_start += c.work.unit_cost();
    c.piece = c.begun = 0;
    c.area = blockIdx.x;
    if (++c.group < c.work.groups) return;
    c.group = 0;
    if (++c.kv_head < static_cast<uint32_t>(p_.kv_heads)) return;
    c.kv_head = 0;
    next_sequence(c);
  }

  // The next one that is this command's, 32 looked at at a time.
  void next_sequence(PagedCursor& c) {
    for (uint32_t base = c.sequence + 1; base < sequences_; base += kWarp) {
      const uint32_t mine = base + threadIdx.x % kWarp;
      const bool taken = mine < sequences_ && sequence_work<Traits>(p_, args_, mine).groups != 0;
      const uint32_t found = __ballot_sync(kAll, taken);
      if (found == 0) continue;
      c.sequence = base + static_cast<uint32_t>(__ffs(static_cast<int32_t>(found))) - 1;
      c.work = sequence_work<Traits>(p_, args_, c.sequence);
      return;
    }
    c.sequence = sequences_;
  }

  void describe(const PagedCursor& c, PagedItem& item) const {
    constexpr uint32_t kKeys = Traits::kStage.keys;
    const SequenceWork& work = c.work;
    const UnitRows rows = unit_rows<Traits>(work.tokens, p_.group, c.group);
    const auto first_token = static_cast<int32_t>(rows.first / p_.group);
    const auto last_token = static_cast<int32_t>((rows.first + rows.count - 1) / p_.group);
    const uint32_t begin = (work.first + c.piece) << work.shift;
    const uint32_t behind = begin + (1u << work.shift);
    const auto low = static_cast<int32_t>(begin < work.begin ? work.begin : begin);
    const auto high = static_cast<int32_t>(behind < work.end ? behind : work.end);
    const DecodeBounds oldest = abi::row_bounds<int32_t>(work.mask, first_token, low, high);
    const DecodeBounds newest = abi::row_bounds<int32_t>(work.mask, last_token, low, high);
    item.end = 0;
    item.new_unit = c.piece == c.begun ? 1 : 0;
    item.ends_unit = c.piece + 1 == work.pieces ? 1 : 0;
    item.sequence = c.sequence, item.kv_head = c.kv_head, item.first_token = work.first_token;
    item.first_row = rows.first, item.rows = rows.count;
    item.mask = work.mask;
    item.origin = work.begin;
    const auto first = static_cast<uint32_t>(oldest.begin);
    item.count = newest.end > oldest.begin ? static_cast<uint32_t>(newest.end) - first : 0;
    item.base = first / kKeys * kKeys;
    item.skip = first - item.base;
    const uint32_t stages = item.count == 0 ? 0 : (item.skip + item.count + kKeys - 1) / kKeys;
    const uint32_t step = blockDim.x / kWarp / Traits::kWarpsPerKey;
    item.rounds = stages == 0 ? 1 : (stages + step - 1) / step;
    item.uniform = oldest.begin == newest.begin && oldest.end == newest.end ? 1 : 0;
    item.piece = c.piece, item.pieces = work.pieces, item.begun = c.begun, item.area = c.area;
    item.bad = work.valid ? 0 : 1;
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  PagedState& state_;
  uint32_t sequences_;
};

}  // namespace gyre::cuda
