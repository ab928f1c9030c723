// Where the tokens of a write go: the tiles of a cache that it enters, and the tokens of each.

#if defined(GYRE_CPU_WRITE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_WRITE_INL_H
#undef GYRE_CPU_WRITE_INL_H
#else
#define GYRE_CPU_WRITE_INL_H
#endif

#include <algorithm>

#include "abi/write.h"
#include "cpu/kernels/kv_tile-inl.h"

#ifndef GYRE_CPU_LIST_SLOTS  // once for all instruction sets, so that abi::SlotList can inline it
#define GYRE_CPU_LIST_SLOTS
namespace gyre::cpu {

template <class Slot>
struct ListSlots {
  const Slot* at;
  uint64_t operator()(uint64_t token) const { return static_cast<uint64_t>(at[token]); }
};

}  // namespace gyre::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

struct FoundTile {
  uint64_t page = 0;    // bytes from page 0 to the tile's page
  uint64_t tile = 0;    // of the page, or of the cache
  bool is_body = true;  // else its tokens are sink tokens, which no tile holds
  TileTokens tokens;
};

// The tiles of one write, whatever says where they are. Found once for all heads of a group, so a
// branch costs nothing, and the code that writes them exists once.
class WriteTargets {
 public:
  // where: the state or the slots; a range has neither.
  WriteTargets(const abi::WriteParams& p, uint64_t where) : p_(p), where_(where) {
    if (p.where == abi::kWriteRange) run_ = p.run;
    if (p.where != abi::kWriteState) return;
    const abi::KvState state = *pointer<const abi::KvState>(where);
    const uint64_t end = std::min(p.places.sink_tokens, abi::append_keys(p, state).end);
    run_ = abi::append_run(p, state);
    first_key_ = state.start;
    sink_tokens_ = end > first_key_ ? end - first_key_ : 0;
    sink_runs_ = (sink_tokens_ + abi::kKvTile - 1) / abi::kKvTile;
    has_f16_ = sink_tokens_ != 0 || p.places.tail_capacity != 0;
  }

  // Runs of sink tokens, then tiles. Every token of a list may have a tile.
  uint64_t count() const {
    return p_.where == abi::kWriteSlots ? p_.tokens : sink_runs_ + run_.tiles;
  }
  // Fills what the caller holds: a copy would wait for the stores of single tokens.
  HWY_NOINLINE void Find(uint64_t index, FoundTile& found) const {
    found.tokens.mask = 0;
    if (p_.where != abi::kWriteSlots) return FindInRun(index, found);
    if (p_.pages.slot_bytes == 4) return FindInList<int32_t>(index, found);
    FindInList<int64_t>(index, found);
  }
  // The token's row among sink tokens and tail, which begin at `f16`; null: it has none.
  Half* F16Row(uint64_t f16, uint64_t stream, uint64_t head, uint64_t token) const {
    if (!has_f16_) return nullptr;
    const uint64_t offset =
        abi::append_f16_offset(p_.places, p_.stream[stream], first_key_ + token, head);
    return offset == abi::kNoF16Row ? nullptr : pointer<Half>(f16 + offset);
  }

 private:
  void FindInRun(uint64_t index, FoundTile& found) const {
    found.is_body = index >= sink_runs_;
    found.tile = found.is_body ? run_.tile(index - sink_runs_) : 0;
    for (uint32_t i = 0; i < abi::kKvTile; ++i) {
      const uint64_t slot = found.tile * abi::kKvTile + i, sink = index * abi::kKvTile + i;
      const bool present = found.is_body ? run_.has(slot) : sink < sink_tokens_;
      if (!present) continue;
      found.tokens.mask |= 1u << i;
      found.tokens.token[i] = found.is_body ? run_.token(slot) : sink;
    }
  }

  // The first token of a tile stands for it.
  template <class Slot>
  void FindInList(uint64_t leader, FoundTile& found) const {
    const abi::SlotList<ListSlots<Slot>> list{
        {pointer<const Slot>(where_)}, p_.tokens, p_.pages.pages * p_.pages.page_tokens};
    if (!list.leads(leader)) return;
    const uint64_t first_slot = list.tile(leader) * abi::kKvTile;
    found.page = first_slot / p_.pages.page_tokens * p_.pages.page_stride;
    found.tile = first_slot % p_.pages.page_tokens / abi::kKvTile;
    constexpr uint64_t kAtOnce = 32;
    for (uint64_t t = leader, end = leader; t < list.tokens; ++t) {
      if (t == end) {
        end = std::min(t + kAtOnce, list.tokens);
        if (!list.any(t, end, first_slot)) {
          t = end - 1;
          continue;
        }
      }
      const uint64_t slot = list.slot(t) - first_slot;
      if (slot >= abi::kKvTile) continue;
      found.tokens.mask |= 1u << slot;
      found.tokens.token[slot] = t;
    }
  }

  const abi::WriteParams& p_;
  uint64_t where_;
  abi::SlotRun run_{};
  uint64_t first_key_ = 0, sink_tokens_ = 0, sink_runs_ = 0;
  bool has_f16_ = false;
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
