// The sequences of a command, what of their keys the queries see, and which task does what. A cache
// is a batch of one. Numbers in device memory may be anything.

#if defined(GYRE_CPU_ATTENTION_BATCH_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_BATCH_INL_H
#undef GYRE_CPU_ATTENTION_BATCH_INL_H
#else
#define GYRE_CPU_ATTENTION_BATCH_INL_H
#endif

#include <algorithm>

#include "abi/attention.h"
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "cpu/attention/cut.h"
#include "cpu/attention/isa/kernels.h"
#include "cpu/kernel.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using enum abi::AttentionArg;
using KeyRange = abi::RowBounds<int64_t>;

// Keys cut into splits, `keys` each and counted from `first`.
struct KeySplits {
  KeyRange all;
  int64_t first, keys;
  uint64_t count;

  KeyRange operator[](uint64_t index) const {
    if (count == 1) return all;
    const int64_t begin = std::min(first + static_cast<int64_t>(index) * keys, all.end);
    return {std::max(begin, all.begin), std::max(all.begin, std::min(begin + keys, all.end))};
  }
};

struct Sequence {
  uint64_t index;
  uint64_t first_token, tokens;
  abi::RowMask<int64_t> mask;
  const int32_t* table;  // its row; null: no pages
  bool valid, prompt;
  KeySplits splits;
  uint64_t row_tiles, tile_rows;  // of a KV head
};

class Batch {
 public:
  // prompts_decode: prompts go the way of decoding, see Decode::takes_prompts().
  Batch(const abi::AttentionParams& p, const uint64_t* args, bool prompts_decode)
      : p_(p), args_(args), prompts_decode_(prompts_decode) {}

  uint64_t sequences() const { return paged() ? p_.table.sequences : 1; }
  uint64_t items(const Sequence& s) const { return p_.kv_heads * s.splits.count * s.row_tiles; }

  // About nanoseconds.
  double cost_of_item(const Sequence& s) const {
    const auto keys = static_cast<double>(s.splits.all.end - s.splits.all.begin);
    const auto rows = static_cast<double>(s.tokens * p_.group) / static_cast<double>(s.row_tiles);
    const double of_key = s.prompt && !prompts_decode_ ? 16 * rows : 20 + 5 * rows;
    return 200 + keys / static_cast<double>(s.splits.count) * of_key;
  }

  Sequence at(uint64_t index) const {
    Sequence s{};
    s.index = index;
    s.valid = true;
    s.tokens = p_.tokens;
    uint64_t length = p_.length;
    bool prompt = false;
    if (paged()) {
      const auto* const begin = pointer<const int32_t>(args_[arg_cu_seqlens_q]) + index;
      const abi::BatchSequence found =
          abi::batch_sequence(p_.table, p_.tokens, begin[0], begin[1],
                              pointer<const int32_t>(args_[arg_kv_lengths])[index]);
      s.first_token = found.first_token;
      s.tokens = found.tokens;
      s.valid = found.valid;
      length = found.length;
      s.table = pointer<const int32_t>(args_[arg_table]) + index * p_.table.stride;
      prompt =
          args_[arg_is_prefill] != 0 && pointer<const uint8_t>(args_[arg_is_prefill])[index] != 0;
    }
    s.prompt = prompt || s.tokens * p_.group > max_decode_rows(p_.group, p_.latent != 0);
    const bool taken =
        abi::attention_takes(p_.phase, s.tokens, p_.table.max_query_length, p_.group, prompt);
    if (s.tokens == 0 || !taken) return s;  // no tiles, no items
    s.tile_rows = tile_rows(s);
    s.row_tiles = (s.tokens * p_.group + s.tile_rows - 1) / s.tile_rows;
    s.mask = mask_of(s, length);
    s.splits = splits_of(s);
    return s;
  }

  // Whether every page that the keys lie in is one of the pool's.
  bool holds(const Sequence& s, const KeyRange& keys) const {
    if (s.table == nullptr || keys.begin >= keys.end) return true;
    const uint64_t page = p_.table.page_tokens;
    const uint64_t first = static_cast<uint64_t>(keys.begin) / page * page;
    for (uint64_t key = first; key < static_cast<uint64_t>(keys.end); key += page) {
      const int32_t entry = s.table[abi::kv_page_entry<uint64_t>(key, page, p_.table.first_entry,
                                                                 p_.table.ring_entries)];
      if (entry < 0 || static_cast<uint64_t>(entry) >= p_.table.pages) return false;
    }
    return true;
  }

 private:
  // Large tiles read the keys less often; enough of them must be left for many threads. No row's
  // bits depend on it.
  uint64_t tile_rows(const Sequence& s) const {
    constexpr uint64_t kEnough = 64;
    if (p_.latent != 0 && !s.prompt) return kMaxRows;
    uint64_t rows = s.prompt && prompts_decode_ ? attention_kernels().prompt_rows : kTileRows;
    while (rows > kTileRows && s.tokens * p_.group * p_.kv_heads < kEnough * rows) rows /= 2;
    return rows;
  }

  bool paged() const { return p_.table.page_tokens != 0; }

  abi::RowMask<int64_t> mask_of(const Sequence& s, uint64_t length) const {
    abi::RowMask<int64_t> mask{static_cast<int64_t>(length), static_cast<int64_t>(s.tokens),
                               abi::row_window<int64_t>(p_.window), p_.causal != 0};
    const uint64_t tail_begin =
        paged()
            ? abi::batch_tail_begin(pointer<const int32_t>(args_[arg_tail_begin]), s.index, length)
            : p_.tail_begin;
    abi::fill_segment(mask, p_.segment, p_.places, tail_begin);
    return mask;
  }

  KeySplits splits_of(const Sequence& s) const {
    const auto& mask = s.mask;
    const int64_t first = paged() ? 0 : static_cast<int64_t>(p_.first_key);
    const int64_t last = paged() ? mask.length : static_cast<int64_t>(p_.end_key);
    KeySplits splits{};
    splits.count = 1;
    splits.all = {abi::row_bounds<int64_t>(mask, 0, first, last).begin,
                  abi::row_bounds<int64_t>(mask, mask.tokens - 1, first, last).end};
    if (p_.partial == abi::kAttentionPartial) {  // as the caller of attention_partial wants them
      splits.all = {first, last};
      splits.first = first;
      splits.keys = static_cast<int64_t>(p_.split_keys);
      splits.count = p_.splits;
      return splits;
    }
    const auto begin = static_cast<uint64_t>(splits.all.begin);
    const auto end = static_cast<uint64_t>(splits.all.end);
    if (!s.prompt && p_.splits > 1 && end - begin > kCut.fewest_keys) {
      const abi::AttentionSplits cut =
          abi::sequence_splits(kCut, static_cast<uint64_t>(mask.length), begin, end);
      splits.keys = static_cast<int64_t>(cut.keys);
      splits.first = static_cast<int64_t>(cut.first * cut.keys);
      splits.count = cut.end - cut.first;
    }
    return splits;
  }

  const abi::AttentionParams& p_;
  const uint64_t* args_;
  bool prompts_decode_;
};

// Calls take(sequence, item) for the items of a task: an equal share of the cost of all. An item is
// a row tile of a KV head and one split of the keys, tiles running fastest: neighbours share keys.
template <class Take>
void ForItems(const Batch& batch, uint32_t task, uint32_t tasks, const Take& take) {
  constexpr uint64_t kSome = 4096;  // sequences, within a millisecond
  double total = 0;
  for (uint64_t i = 0; i < batch.sequences(); ++i) {
    if (i % kSome == 0 && task_ended()) return;
    const Sequence s = batch.at(i);
    if (s.row_tiles != 0) total += static_cast<double>(batch.items(s)) * batch.cost_of_item(s);
  }
  double before = 0;
  for (uint64_t i = 0; i < batch.sequences(); ++i) {
    if (i % kSome == 0 && task_ended()) return;
    const Sequence s = batch.at(i);
    if (s.row_tiles == 0) continue;
    const uint64_t items = batch.items(s);
    const double each = batch.cost_of_item(s);
    // The task in whose share an item's middle falls.
    const auto owner = [&](uint64_t item) {
      const double middle = before + (static_cast<double>(item) + 0.5) * each;
      return static_cast<uint32_t>(std::min(middle / total * tasks, tasks - 1.0));
    };
    const auto first_of = [&](uint32_t wanted) {
      uint64_t low = 0, high = items;
      while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (owner(middle) < wanted) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      return low;
    };
    const uint64_t end = first_of(task + 1);
    for (uint64_t item = first_of(task); item < end; ++item) take(s, item);
    before += static_cast<double>(items) * each;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
