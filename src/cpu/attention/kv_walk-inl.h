// The order in which keys are read: blocks of up to 64 slots that lie side by side.

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

// Consecutive slots from a tile's first on, at most kBlockKeys. Lanes [begin, end) hold keys.
struct KeyBlock {
  uint64_t tile;
  uint32_t begin, end;
  int64_t key;  // number of lane 0's key; lanes before `begin` may not have one
  uint32_t tiles() const { return (end + abi::kKvTile - 1) / abi::kKvTile; }
  uint32_t lanes() const { return tiles() * abi::kKvTile; }
};

// Calls take(block) for the blocks of keys [first, last), oldest first.
template <class Take>
HWY_INLINE void ForBlocks(const abi::AttentionParams& p, int64_t first, int64_t last,
                          const Take& take) {
  if (first >= last) return;
  const uint64_t slot = abi::kv_slot(p.ring_start + static_cast<uint64_t>(first), p.capacity);
  const auto walk =
      abi::kv_walk<uint64_t>(p.capacity, slot, static_cast<uint64_t>(last - first), kBlockKeys);
  for (uint64_t index = 0; index < walk.tiles;) {
    const abi::KvRun<uint64_t> run = walk.run(index, kBlockKeys / abi::kKvTile);
    const auto begin = static_cast<uint32_t>(run.begin - index * abi::kKvTile);
    const auto end = static_cast<uint32_t>(run.end - index * abi::kKvTile);
    take(KeyBlock{run.tile, begin, end,
                  first + static_cast<int64_t>(walk.key_at(run.begin)) - begin});
    index += run.tiles;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
