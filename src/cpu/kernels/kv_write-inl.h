// Where the tokens of a list of slots go, in pages.

#if defined(GYRE_CPU_KV_WRITE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_WRITE_INL_H
#undef GYRE_CPU_KV_WRITE_INL_H
#else
#define GYRE_CPU_KV_WRITE_INL_H
#endif

#include <algorithm>

#include "abi/kv_write.h"
#include "cpu/kernels/kv_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint64_t kNoTile = ~uint64_t{0};

// The list of slots, which may hold anything.
template <class Slot>
struct SlotList {
  const Slot* slots;
  uint64_t tokens, count;  // of slots in the pages

  uint64_t slot(uint64_t token) const { return static_cast<uint64_t>(slots[token]); }
  // A negative slot is beyond every count.
  uint64_t tile(uint64_t token) const {
    return slot(token) < count ? slot(token) / abi::kKvTile : kNoTile;
  }
  // A tile has one writer, whatever the order of the list: the first of its tokens.
  bool leads(uint64_t token) const {
    const uint64_t own = tile(token);
    if (own == kNoTile) return false;
    const uint64_t first = own * abi::kKvTile;
    for (uint64_t t = token; t != 0; --t) {  // the token before usually decides
      if (slot(t - 1) - first < abi::kKvTile) return false;
    }
    return true;
  }
};

// Tokens of one tile. Of tokens that name one slot the last is kept.
struct TileRun {
  uint64_t first_slot;
  TileTokens tokens;
};

template <class Slot>
TileRun FindRun(const SlotList<Slot>& list, uint64_t leader) {
  TileRun run{list.tile(leader) * abi::kKvTile, {}};
  for (uint64_t t = leader; t < list.tokens; ++t) {
    const uint64_t place = list.slot(t) - run.first_slot;
    if (place >= abi::kKvTile) continue;
    run.tokens.mask |= 1u << place;
    run.tokens.token[place] = t;
  }
  return run;
}

// Without its sources. `row` counts heads of K, then heads of V; arguments as kv_write has them.
inline KvTileJob FindTile(const abi::KvWriteParams& p, const uint64_t* args, const TileRun& run,
                          uint64_t row) {
  KvTileJob job;
  job.stream = row / p.heads;
  const uint64_t head = row % p.heads;
  const abi::KvQuantizeStream& s = p.stream[job.stream];
  const uint64_t* const stream_args = args + 3 * job.stream;
  const uint64_t page = run.first_slot / p.page_tokens * p.page_stride;
  const uint64_t tile = run.first_slot % p.page_tokens / abi::kKvTile;
  job.codes = pointer<uint8_t>(stream_args[1] + page) + head * s.cache.codes_head_stride +
              tile * s.cache.codes_tile_stride;
  job.scales = pointer<uint8_t>(stream_args[2] + page) + head * s.cache.scales_head_stride +
               tile * s.cache.scales_tile_stride;
  job.mask = run.tokens.mask;
  std::fill(std::begin(job.next), std::end(job.next), nullptr);
  return job;
}

// Rows of the caller's tensor.
inline void SetSources(const abi::KvWriteParams& p, const uint64_t* args, const TileRun& run,
                       uint64_t head, KvTileJob& job) {
  const abi::KvQuantizeStream& s = p.stream[job.stream];
  const auto* const source =
      pointer<const std::byte>(args[3 * job.stream]) + head * s.source_head_stride;
  for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
    if ((run.tokens.mask >> slot & 1) == 0) continue;
    job.source[slot] = source + run.tokens.token[slot] * s.source_token_stride;
    if (head + 1 < p.heads) job.next[slot] = job.source[slot] + s.source_head_stride;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
