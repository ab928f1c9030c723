// The order in which keys are read: blocks of up to 64 slots that lie side by side. Blocks begin at
// multiples of 64 keys, counted from the sequence's first, or at the tile that holds such a key: a
// row's sums then do not depend on where the walk began.

#if defined(GYRE_CPU_ATTENTION_KV_WALK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_KV_WALK_INL_H
#undef GYRE_CPU_ATTENTION_KV_WALK_INL_H
#else
#define GYRE_CPU_ATTENTION_KV_WALK_INL_H
#endif

#include "abi/attention.h"
#include "abi/kv_walk.h"
#include "cpu/attention/isa/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// A tile of a page. Without pages `page` is 0.
struct TilePlace {
  uint64_t page;  // bytes from the first page
  uint64_t tile;

  TilePlace operator+(uint64_t tiles) const { return {page, tile + tiles}; }
};

// Consecutive slots from a tile's first on, at most kBlockKeys. Lanes [begin, end) hold keys.
struct KeyBlock {
  TilePlace at;
  TilePlace next;  // where the block after this one begins, for prefetching
  uint32_t begin, end;
  int64_t key;  // number of lane 0's key; lanes before `begin` may not have one
  uint32_t tiles() const { return (end + abi::kKvTile - 1) / abi::kKvTile; }
  uint32_t lanes() const { return tiles() * abi::kKvTile; }
  // Where lane 0 would lie if the block were not cut at its beginning.
  uint32_t offset() const {
    constexpr uint32_t kMask = kBlockKeys - abi::kKvTile;  // whole tiles within a block
    return static_cast<uint32_t>(key) & kMask;
  }
};

// Blocks of keys [first, last), oldest first: of a ring, or of pages if there is a table. The
// table's entries for these keys were checked.
class BlockWalk {
 public:
  BlockWalk(const abi::AttentionParams& p, const int32_t* table, int64_t first, int64_t last)
      : p_(p), table_(table), first_(first), last_(last) {
    if (first >= last) {
      last_ = first;
    } else if (table == nullptr) {
      const uint64_t slot = abi::kv_slot(p.ring_start + static_cast<uint64_t>(first), p.capacity);
      ring_ =
          abi::kv_walk<uint64_t>(p.capacity, slot, static_cast<uint64_t>(last - first), kBlockKeys);
    } else {
      next_key_ = first;
      next_ = place_of(first);
    }
  }

  bool next(KeyBlock& block) { return table_ == nullptr ? next_of_ring(block) : next_page(block); }

 private:
  bool next_of_ring(KeyBlock& block) {
    constexpr auto kKeys = static_cast<int64_t>(kBlockKeys);
    if (index_ >= ring_.tiles) return false;
    const uint64_t lane0 = index_ * abi::kKvTile, begin = ring_.run(index_, 1).begin;
    block.key =
        first_ + static_cast<int64_t>(ring_.key_at(begin)) - static_cast<int64_t>(begin - lane0);
    const auto keys = static_cast<uint64_t>(kKeys - (block.key & (kKeys - 1)));
    const abi::KvRun<uint64_t> run = ring_.run(index_, (keys + abi::kKvTile - 1) / abi::kKvTile);
    block.at = {0, run.tile};
    block.next = {0, run.tile + run.tiles};
    block.begin = static_cast<uint32_t>(begin - lane0);
    block.end = static_cast<uint32_t>(run.end - lane0);
    index_ += run.tiles;
    return true;
  }

  bool next_page(KeyBlock& block) {
    if (next_key_ >= last_) return false;
    const auto run =
        abi::kv_page_run<uint64_t>(static_cast<uint64_t>(next_key_), static_cast<uint64_t>(last_),
                                   p_.table.page_tokens, kBlockKeys);
    const uint64_t skip = run.begin % abi::kKvTile;
    block.at = next_;
    block.begin = static_cast<uint32_t>(skip);
    block.end = static_cast<uint32_t>(run.end - run.begin + skip);
    block.key = next_key_ - static_cast<int64_t>(skip);
    next_key_ = static_cast<int64_t>(run.end);
    if (next_key_ < last_) next_ = place_of(next_key_);
    block.next = next_;
    return true;
  }

  TilePlace place_of(int64_t key) const {
    const auto at = static_cast<uint64_t>(key);
    const abi::KvTable& t = p_.table;
    const uint64_t entry =
        abi::kv_page_entry<uint64_t>(at, t.page_tokens, t.first_entry, t.ring_entries);
    return {static_cast<uint64_t>(table_[entry]) * t.page_stride,
            at % t.page_tokens / abi::kKvTile};
  }

  const abi::AttentionParams& p_;
  const int32_t* table_;
  int64_t first_, last_;
  abi::KvWalk<uint64_t> ring_{};
  uint64_t index_ = 0;  // of the next tile
  int64_t next_key_ = 0;
  TilePlace next_{};
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
