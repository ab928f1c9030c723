#pragma once
// Latent attention: where the keys of a work item lie, a tile of eight for each lane of a producer
// warp. All threads of the producer warpgroup together.
#include "cuda/kernels/attention/latent/traits.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

template <class T>
class StageTiles {
 protected:
  // Where a lane's tile of a stage lies; lanes beyond the stage's tiles repeat.
  struct LaneTile {
    uint64_t page = 0, tile = 0;  // bytes to the page, and the tile in it or in the cache
    bool present = false;
    uint64_t offset(uint64_t tile_stride) const { return page + tile * tile_stride; }
  };

  StageTiles(const abi::AttentionParams& p, const Args& args)
      : p_(p), args_(args), state_(latent_state<T>()) {}

  static uint32_t thread() { return threadIdx.x % kLatentGroup; }
  static void sync() { sync_named_barrier<kLatentGroup / kWarp>(0); }

  // `item` counts the work items of the block.
  void start(const LatentWork& work, uint32_t item) {
    invalid_ = &state_.invalid[item % 2];
    walk_ = LatentWalk::of<T::kKeys>(p_, work);
    hidden_ = p_.table.page_tokens != 0 ? 0 : static_cast<uint32_t>(work.begin - walk_.first_key);
    entries_ = args_.at[arg_table] +
               (work.sequence * p_.table.stride + p_.table.first_entry) * sizeof(uint32_t);
  }
  // The `index`-th tile of the walk.
  LaneTile find_tile(uint32_t index) {
    LaneTile tile;
    tile.present = index < walk_.tiles && (index + 1) * abi::kKvTile > walk_.skip;
    if (p_.table.page_tokens == 0) {
      tile.tile = walk_.tile(index);
    } else if (tile.present) {
      const uint32_t page_tiles = p_.table.page_tokens / abi::kKvTile;
      const uint32_t at = walk_.base_tile + index, nth = at / page_tiles;
      const uint32_t entry = p_.table.ring_entries == 0 ? nth : nth % p_.table.ring_entries;
      uint64_t page = pointer<const uint32_t>(entries_)[entry];
      if (page >= p_.table.pages) *invalid_ = 1, page = 0;
      tile.page = page * p_.table.page_stride;
      tile.tile = at - nth * page_tiles;
    }
    return tile;
  }
  LaneTile find_stage_tile(uint32_t stage) {
    return find_tile(stage * T::kTiles + thread() % T::kTiles);
  }
  // The stored scales of a thread's key.
  struct Scales {
    uint16_t k[2] = {}, v = 0;
  };
  Scales load_scales(const LaneTile& tile) const {
    const uint32_t key = thread() % T::kKeys;
    const uint64_t k_at = shuffled(tile.offset(p_.k.scales_tile_stride), key / 8),
                   v_at = shuffled(tile.offset(p_.v.scales_tile_stride), key / 8);
    const bool there = (__ballot_sync(kAll, tile.present ? 1 : 0) >> (key / 8) & 1) != 0;
    Scales scales;
    if constexpr (T::kLevelsK) {
      const auto* const from = pointer<const uint16_t>(args_.at[arg_k_scales] + k_at) + key % 8;
#pragma unroll
      for (uint32_t i = 0; i < T::kScales; ++i)
        if (there) scales.k[i] = from[i * abi::kKvTile];
    }
    if constexpr (T::kRotatedV) {
      if (there) scales.v = pointer<const uint16_t>(args_.at[arg_v_scales] + v_at)[key % 8];
    }
    return scales;
  }

  uint32_t key_number(uint32_t stage, uint32_t column) const {
    const uint32_t key = walk_.key_of(stage * T::kKeys + column);
    return key < hidden_ ? walk_.kNoKey : key;
  }
  // Whether a stage's tiles lie one behind the other: most do, unless pages are small.
  static bool in_run(const LaneTile& tile, uint64_t tile_stride, uint32_t tile_bytes) {
    const uint64_t offset = tile.offset(tile_stride), first = shuffled(offset, 0);
    const uint32_t on = threadIdx.x % T::kTiles * tile_bytes;
    return __all_sync(kAll, tile.present && offset == first + on && tile_stride == tile_bytes) != 0;
  }

  const abi::AttentionParams& p_;
  const Args& args_;
  LatentState& state_;
  uint32_t* invalid_ = nullptr;
  LatentWalk walk_;
  StageCount count_;
  uint32_t hidden_ = 0;  // keys of the walk before the work item's first
  uint64_t entries_ = 0;
};

}  // namespace gyre::cuda
