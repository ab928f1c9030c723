#pragma once
// Decode attention over pages: the loads of a warp, which run ahead of what it computes, from item
// to item. Entries of the page table are read a stage before they are needed.
#include "cuda/kernels/attention/kv_load.cuh"
#include "cuda/kernels/attention/paged_work.cuh"

namespace gyre::cuda {

// A walk in which position 0 is that of a stage, wherever the keys begin.
inline DecodeWalk paged_walk(const PagedItem& item, uint32_t stage_keys) {
  DecodeWalk w = {};
  w.skip = item.skip;
  w.end_a = item.skip + item.count;
  w.tiles_a = item.count == 0 ? 0 : (w.end_a + abi::kKvTile - 1) / abi::kKvTile;
  w.tiles = w.tiles_a;
  w.end_b = w.tiles_a * abi::kKvTile;
  w.starts_a = item.count < stage_keys ? 0 : item.count - stage_keys + 1;
  return w;
}

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

template <class Traits>
class PagedLoads {
  static constexpr uint32_t kKeys = Traits::kStage.keys, kTiles = Traits::kTiles;

 public:
  PagedLoads(const abi::AttentionParams& p, const Args& args, PagedState& state, uint32_t warp)
      : p_(p), args_(args), state_(state), addresses_(p, args, warp % Traits::kWarpsPerKey) {}

  // Reads the lane's entry for the stage that comes next.
  void look_up() {
    const PagedItem& item = state_.item(item_);
    page_ = tile_ = 0;
    const uint32_t tile = stage() * kTiles + lane();
    const uint32_t end = item.skip + item.count;
    // Entries of pages that no key is read from are stale.
    if (item.end != 0 || lane() >= kTiles || tile < item.skip / abi::kKvTile ||
        tile * abi::kKvTile >= end || item.count == 0)
      return;
    const uint32_t at = item.base / abi::kKvTile + tile;
    const uint32_t page_tiles = p_.table.page_tokens / abi::kKvTile;
    uint32_t entry = page_tiles == 1 ? at : __umulhi(at, p_.table.page_inverse);
    tile_ = at - entry * page_tiles;
    if (p_.table.ring_entries != 0) entry %= p_.table.ring_entries;
    page_ = pointer<const uint32_t>(
        args_.at[arg_table])[item.sequence * p_.table.stride + p_.table.first_entry + entry];
  }

  // Issues the loads of the next stage and goes on to the one behind it. Past the last item there
  // is nothing to load.
  void issue(unsigned char* to) {
    PagedItem& item = state_.item(item_);
    if (item.end != 0) {
      copy_commit();
      return;
    }
    const bool known = page_ < static_cast<uint32_t>(p_.table.pages);
    if (!known) item.bad = 1;
    const PageTiles pages = {item.kv_head * p_.k.codes_head_stride,
                             static_cast<uint32_t>(p_.table.page_stride), known ? page_ : 0, tile_};
    addresses_.get().start(pages, p_.table.page_tokens % kKeys == 0, paged_walk(item, kKeys),
                           stage(), to);
    if (++round_ == item.rounds) ++item_, round_ = 0;
    look_up();
  }

 private:
  static uint32_t lane() { return threadIdx.x % kWarp; }
  uint32_t stage() const {
    constexpr uint32_t kPerKey = Traits::kWarpsPerKey;
    return round_ * (blockDim.x / (kWarp * kPerKey)) + threadIdx.x / (kWarp * kPerKey);
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  PagedState& state_;
  StageAddresses<Traits> addresses_;
  uint32_t item_ = 0, round_ = 0;  // of the next stage
  uint32_t page_ = 0, tile_ = 0;   // of the lane's tile of it
};

}  // namespace gyre::cuda
