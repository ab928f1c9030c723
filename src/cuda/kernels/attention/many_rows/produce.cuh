#pragma once
// Attention of many rows: what the producer warps do. Item 2 i is K of stage i, item 2 i + 1 its V.
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/producer_keys.cuh"

namespace gyre::cuda {

template <class T>
class Producer {
 public:
  static constexpr ManyRowsLayout kLayout = T::kLayout;
  static constexpr bool kAnyLevels = T::kLevelsK || T::kLevelsV;

  explicit Producer(ManyRowsState& state)
      : state_(state),
        tile_(state.tile),
        keys_(state.tile),
        table_k_(load_table<T::kK, true>(state.table_k)),
        table_v_(load_table<T::kV, true>(state.table_v)) {
    // The first row's end and the last one's begin: keys between them are seen by all rows.
    const auto number = [&](int64_t key) {
      return static_cast<uint32_t>(key < tile_.walk_key ? 0 : key - tile_.walk_key);
    };
    seen_from_ = number(tile_.bounds(tile_.token(tile_.rows - 1)).begin);
    seen_to_ = tile_.params.tree_stride != 0 ? 0 : number(tile_.bounds(tile_.token(0)).end);
    find_tile(0);
  }

  void run() {
    const uint32_t items = 2 * tile_.stage_count();
    SlotCursor<kLayout.slots> at;
    // Item m is copied, and item m - ahead + 1 handed over.
    constexpr uint32_t kBefore = kLayout.ahead - 1;
#pragma unroll 1
    for (uint32_t m = 0; m < items + kBefore; ++m) {
      const uint32_t n = m - kBefore;
      if (m >= kBefore) {
        copy_wait<kBefore - 1>();
        // All of the item is there, and nobody reads the one before it any more.
        if constexpr (kAnyLevels) sync();
      }
      begin_copy(m, items, true);
      if (m >= kBefore) {
        if (is_keys(n)) {
          hand_over<T::kK, true>(n, at);
        } else {
          hand_over<T::kV, false>(n, at);
          if constexpr (!T::kLevelsV) find_non_finite(stage_of(n), at.slot);
        }
        fence_operands();
        arrive(&state_.full[at.slot]);
        at = at.next();
      }
      begin_copy(m, items, false);
      copy_commit();
    }
    copy_wait<0>();
  }

 private:
  static uint32_t thread() { return producer_thread<T>(); }
  void sync() { sync_role<kProducerRole, kProducers>(state_, syncs_++); }
  static bool is_keys(uint32_t item) { return item % 2 == 0; }
  static uint32_t stage_of(uint32_t item) { return item / 2; }
  unsigned char* slot(uint32_t index) const {
    return dynamic_shared() + kLayout.slot + index * kLayout.slot_bytes;
  }
  // Where a lane's tile of a stage lies.
  struct LaneTile {
    RowTile::TileAt at;
    bool present;
    uint64_t offset(uint64_t tile_stride) const { return at.offset + at.tile * tile_stride; }
  };
  unsigned char* stored(uint32_t index) const {
    return dynamic_shared() + kLayout.stored + index * kLayout.stored_bytes;
  }

  // Copies of item n, if it goes through the ring of stored bytes (`levels`) or not.
  void begin_copy(uint32_t n, uint32_t items, bool levels) {
    if (n >= items) return;
    const abi::AttentionParams& p = tile_.params;
    if (!is_keys(n)) {
      if (levels != T::kLevelsV) return;
      copy_item<T::kLevelsV, T::kVDim, kLayout.v_tile_bytes, kLayout.v_panel>(
          n, now_, p.v, tile_.v_codes, tile_.v_scales);
    } else if (levels == T::kLevelsK) {
      now_ = next_;
      find_tile(stage_of(n) + 1);
      copy_item<T::kLevelsK, T::kKDim, kLayout.k_tile_bytes, kLayout.k_panel>(
          n, now_, p.k, tile_.k_codes, tile_.k_scales);
    }
  }

  // Where this lane's tile of a stage lies; lanes beyond the stage's tiles repeat. One stage ahead:
  // the page table is slow to read.
  void find_tile(uint32_t stage) {
    const uint32_t index = stage * T::kTiles + threadIdx.x % kWarp % T::kTiles;
    next_.present = index < keys_.walk.tiles && (index + 1) * abi::kKvTile > keys_.walk.skip;
    next_.at = {0, keys_.walk.tile(index)};
    if (tile_.paged() && next_.present) next_.at = tile_.page_tile(index);
  }

  template <bool kLevels, uint32_t kDim, uint32_t kTileBytes, uint32_t kPanel>
  void copy_item(uint32_t n, const LaneTile& tile, const abi::KvCacheLayout& layout,
                 const uint8_t* codes, const uint8_t* scales) {
    const uint64_t tile_offset = tile.offset(layout.codes_tile_stride);
    if constexpr (kLevels) {
      const uint32_t there = __ballot_sync(kAll, tile.present ? 1 : 0);
      unsigned char* const to = stored(n % kLayout.ahead);
      copy_stored<kTileBytes>(tile_offset, there, codes, to);
      // A part of the scales by each warp.
      const ScalesOf of = scales_of(n, thread() / kWarp, tile, layout, scales);
      if (thread() % kWarp < T::kTiles && tile.present && of.from != nullptr)
        copy_async<16>(shared_address(to + of.to), of.from, true);
    } else {
      const uint32_t there = __ballot_sync(kAll, tile.present ? 1 : 0);
      const uint32_t at = n % kLayout.slots;
      wait_for_phase(&state_.empty[at], n / kLayout.slots % 2 ^ 1);
      const uint32_t stage = stage_of(n);
      if (is_keys(n)) keys_.number(stage);
      const uint64_t stride = layout.codes_tile_stride / abi::kKvTile;
      const bool whole = keys_.walk.whole(stage * T::kKeys);
      if (whole && in_runs(tile_offset, layout.codes_tile_stride, kTileBytes)) {
        copy_runs<kDim, kPanel>(tile_offset, codes, slot(at));
      } else if (whole) {
        copy_rows<kDim, kPanel, true>(stage, tile_offset, there, stride, codes, slot(at));
      } else {
        copy_rows<kDim, kPanel, false>(stage, tile_offset, there, stride, codes, slot(at));
      }
    }
  }

  // Where the scales of the lane's tile are, and where in a stored item they go: part 0 the item's
  // own, part 1 those of V that come with K. None: nullptr.
  struct ScalesOf {
    const uint8_t* from;
    uint32_t to;
  };
  ScalesOf scales_of(uint32_t n, uint32_t part, const LaneTile& tile,
                     const abi::KvCacheLayout& layout, const uint8_t* scales) const {
    const bool keys = is_keys(n);
    const uint32_t to =
        kLayout.stored_scales + (part * T::kTiles + threadIdx.x % kWarp % T::kTiles) * 16;
    if (part == 0 && (keys || !T::kScalesWithKeys))
      return {scales + tile.offset(layout.scales_tile_stride), to};
    if (part == 1 && keys && T::kScalesWithKeys)
      return {tile_.v_scales + tile.offset(tile_.params.v.scales_tile_stride), to};
    return {nullptr, 0};
  }

  // Tiles of levels as they are stored, one behind the other.
  template <uint32_t kTileBytes>
  void copy_stored(uint64_t tile_offset, uint32_t there, const uint8_t* codes,
                   unsigned char* to) const {
    constexpr uint32_t kChunks = kTileBytes / 16;
    // A warp's lanes go on together: chunks are a multiple of 32.
    static_assert(T::kTiles * kChunks % kWarp == 0);
#pragma unroll 4
    for (uint32_t c = thread(); c < T::kTiles * kChunks; c += kProducers) {
      const uint32_t tile = c / kChunks;
      const uint64_t from = shuffled(tile_offset, tile);
      if ((there >> tile & 1) != 0)
        copy_async<16>(shared_address(to + c * 16), codes + from + c % kChunks * 16, true);
    }
  }

  // Whether each eight of the stage's tiles lie one behind the other: most do, unless pages are
  // small.
  static constexpr uint32_t kRunTiles = 8;
  static bool in_runs(uint64_t tile_offset, uint64_t tile_stride, uint32_t tile_bytes) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint64_t first = shuffled(tile_offset, lane / kRunTiles * kRunTiles);
    return tile_stride == tile_bytes &&
           __all_sync(kAll, tile_offset == first + lane % kRunTiles * tile_bytes ? 1 : 0) != 0;
  }
  // As copy_rows, where they do: addresses differ by constants.
  template <uint32_t kDim, uint32_t kPanel>
  void copy_runs(uint64_t tile_offset, const uint8_t* codes, unsigned char* to) const {
    using Copies = RowCopies<kDim>;
    constexpr uint32_t kChunks = Copies::kChunks, kLanes = Copies::kLanes, kRow = kDim * 2;
    const Copies of(thread());
    const uint32_t lane = thread() % kLanes;
    const uint8_t* const from = codes + (of.tile * 8 + of.row) * kRow + lane * 16;
    const SharedAddress target = shared_address(to + of.tile * 1024 + of.row * 128) +
                                 lane / 8 * kPanel + ((lane ^ of.row) & 7) * 16;
#pragma unroll
    for (uint32_t first = 0; first < T::kTiles; first += kRunTiles) {
      const uint8_t* const run = from + shuffled(tile_offset, first);
#pragma unroll
      for (uint32_t tile = 0; tile < kRunTiles; tile += Copies::kTilesAtOnce) {
#pragma unroll
        for (uint32_t c = 0; c < kChunks; c += kLanes) {
          if (kChunks % kLanes != 0 && c + lane >= kChunks) continue;
          copy_async<16>(target + (first + tile) * 1024 + c / 8 * kPanel,
                         run + tile * 8 * kRow + c * 16, true);
        }
      }
    }
  }

  // Rows of 16-bit floats to their places in the operand; those without a key become zeros. A whole
  // stage has a key in every row: most have.
  template <uint32_t kDim, uint32_t kPanel, bool kWhole>
  void copy_rows(uint32_t stage, uint64_t tile_offset, uint32_t there, uint64_t stride,
                 const uint8_t* codes, unsigned char* to) const {
    using Copies = RowCopies<kDim>;
    constexpr uint32_t kChunks = Copies::kChunks, kLanes = Copies::kLanes;
    const Copies copies(thread());
    const uint32_t lane = thread() % kLanes, row = copies.row;
    const uint8_t* const from = codes + row * stride + lane * 16;
    const SharedAddress target = shared_address(to + row * 128);
#pragma unroll 4
    for (uint32_t i = 0; i < T::kTiles / Copies::kTilesAtOnce; ++i) {
      const uint32_t tile = i * Copies::kTilesAtOnce + copies.tile;
      const uint64_t offset = shuffled(tile_offset, tile);
      const bool key =
          kWhole || ((there >> tile & 1) != 0 &&
                     keys_.walk.valid((stage * T::kTiles + tile) * abi::kKvTile + row));
#pragma unroll
      for (uint32_t c = 0; c < kChunks; c += kLanes) {
        if (kChunks % kLanes != 0 && c + lane >= kChunks) continue;
        copy_async<16>(
            target + tile * 1024 + (c + lane) / 8 * kPanel + (((c + lane) ^ row) & 7) * 16,
            key ? from + offset + c * 16 : codes, key);
      }
    }
  }

  // Levels become operands; what was copied into the slot is there already.
  template <uint32_t kFormat, bool kKeysItem>
  void hand_over(uint32_t n, const SlotCursor<kLayout.slots>& at) {
    if constexpr (abi::kv_is_native(kFormat)) {
      const uint32_t stage = stage_of(n), from = n % kLayout.ahead;
      wait_for_phase(&state_.empty[at.slot], at.phase ^ 1);
      unsigned char* const to = slot(at.slot);
      const unsigned char* const bytes = stored(from);
      if constexpr (kKeysItem) keys_.number(stage);
      if constexpr (kKeysItem || !T::kScalesWithKeys) {
        hand_over_scales<kKeysItem, T::kLevelsV && kKeysItem == T::kScalesWithKeys>(
            stage, bytes + kLayout.stored_scales);
        sync();
      }
      if constexpr (kKeysItem) {
        unpack_keys(bytes, to);
      } else {
        unpack_values_item(bytes, to);
      }
    }
  }

  // What levels of K and V are multiplied by, and their keys' multipliers. `scales`: K's, then V's.
  template <bool kOfK, bool kOfV>
  void hand_over_scales(uint32_t stage, const unsigned char* scales) const {
    const uint32_t key = thread() % T::kKeys;
    const auto* const stored = reinterpret_cast<const uint16_t*>(scales) + key;
    OperandScale k = {0, kScaleOne}, v = k;
    if constexpr (kOfK) {
      k = operand_scale(stored[0]);
      reinterpret_cast<uint32_t*>(k_scales())[key] = k.f16 * 0x10001u;
    }
    if constexpr (kOfV) {
      v = operand_scale(stored[kOfK ? T::kKeys : 0]);
      reinterpret_cast<uint16_t*>(v_scales())[key] = static_cast<uint16_t>(v.f16);
    }
    keys_.template hand_over<kOfK, kOfV>(stage, k.multiplier, v.multiplier);
  }
  static unsigned char* k_scales() { return dynamic_shared() + kLayout.operand_scales; }
  static unsigned char* v_scales() { return k_scales() + T::kKeys * 4; }

  // Chunks of an operand that a thread makes at a time: it loads their codes first, or each load
  // would wait for the store before it.
  static constexpr uint32_t kAtOnce = T::kVDim > 128 ? 2 : 4;

  // A thread's chunk of every kStep-th key. Offsets of later keys differ from the first ones' by
  // constants: a tile of 8 rows is 1024 bytes of the operand.
  void unpack_keys(const unsigned char* bytes, unsigned char* to) {
    if constexpr (T::kLevelsK) {
      constexpr uint32_t kUnits = T::kKDim / 8, kRowBytes = kLayout.k_tile_bytes / 8,
                         kStep = kProducers / kUnits, kCount = T::kKeys / kStep,
                         kBases = kStep < 8 ? 8 / kStep : 1;
      static_assert(kProducers % kUnits == 0 && kCount % kAtOnce == 0);
      const uint32_t chunk = thread() % kUnits, key = thread() / kUnits;
      const unsigned char* const from = bytes + key * kRowBytes;
      const auto* const factors = reinterpret_cast<const uint32_t*>(k_scales()) + key;
      unsigned char* bases[kBases];
#pragma unroll
      for (uint32_t i = 0; i < kBases; ++i) {
        const uint32_t of = key + i * kStep;
        bases[i] = to + operand_byte(kLayout.k_panel, of, chunk);
      }
#pragma unroll
      for (uint32_t first = 0; first < kCount; first += kAtOnce) {
        KeyWords<T::kK> words[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          words[i] = {from + (first + i) * kStep * kRowBytes, T::kKDim, chunk / 4, chunk % 4};
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const Operands<1> x = words[i].operands(table_k_, chunk / 4);
          constexpr uint32_t kTiles = kStep * kBases / 8;  // from a base's key to its next
          *reinterpret_cast<uint4*>(bases[(first + i) % kBases] +
                                    (first + i) / kBases * kTiles * 1024) =
              scaled_chunk(level_chunk<T::kK>(x), factors[(first + i) * kStep]);
        }
      }
    }
  }

  // Two coordinates of every kStep-th tile; a chunk is eight tokens of a coordinate.
  void unpack_values_item(const unsigned char* bytes, unsigned char* to) {
    if constexpr (T::kLevelsV) {
      constexpr uint32_t kHalf = T::kVDim / 2, kStep = kProducers / kHalf,
                         kCount = T::kTiles / kStep,
                         kTogether = kAtOnce < kCount ? kAtOnce : kCount;
      static_assert(kProducers % kHalf == 0 && kHalf % 8 == 0 && kCount % kTogether == 0);
      const uint32_t coordinate = thread() % kHalf, tile = thread() / kHalf;
      const unsigned char* const from = bytes + tile * kLayout.v_tile_bytes;
      const uint32_t base = operand_byte(kLayout.v_panel, coordinate, tile);
#pragma unroll
      for (uint32_t first = 0; first < kCount; first += kTogether) {
        ValuePair<T::kV> pairs[kTogether];
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i)
          pairs[i] = {from + (first + i) * kStep * kLayout.v_tile_bytes, T::kVDim, coordinate,
                      coordinate + kHalf};
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i) {
          // Bits of the first tile and of the steps are others: the XOR swizzle takes them in turn.
          const uint32_t on = (first + i) * kStep;
          unsigned char* const target = to + (base ^ on % 8 * 16) + on / 8 * kLayout.v_panel;
          Operands<1> x[2];
          unpack_values<T::kV, true>(table_v_, pairs[i].low, pairs[i].high, 0, x);
          const uint4 factors = *reinterpret_cast<const uint4*>(v_scales() + (tile + on) * 16);
#pragma unroll
          for (uint32_t e = 0; e < 2; ++e)
            *reinterpret_cast<uint4*>(target + e * kHalf * 128) =
                scaled_chunk(level_chunk<T::kV>(x[e]), factors);
        }
      }
    }
  }
  // Infinity times a weight of 0 is NaN: where rows do not see all keys of a stage, what is not
  // finite becomes 0, and the consumers are told which keys had it. A thread looks at what it
  // copied; a warp's keys are a bit each.
  void find_non_finite(uint32_t stage, uint32_t at) {
    const uint32_t begin = stage * T::kKeys, first = keys_.walk.key_at(begin);
    const bool all_seen =
        keys_.walk.whole(begin) && first >= seen_from_ && first + T::kKeys <= seen_to_;
    const uint32_t non_finite = all_seen ? 0 : __reduce_or_sync(kAll, zero_non_finite(slot(at)));
    if (thread() % kWarp == 0)
      reinterpret_cast<uint32_t*>(key_info<T>(stage) + kLayout.maxima)[thread() / kWarp] =
          non_finite;
  }
  uint32_t zero_non_finite(unsigned char* values) const {
    using Copies = RowCopies<T::kVDim>;
    constexpr uint32_t kExponent = T::kV == kFormatF16 ? 0x7C00u : 0x7F80u;
    const Copies copies(thread());
    uint32_t non_finite = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < T::kTiles / Copies::kTilesAtOnce; ++i) {
      const uint32_t row = (i * Copies::kTilesAtOnce + copies.tile) * 8 + copies.row;
#pragma unroll 1
      for (uint32_t c = thread() % Copies::kLanes; c < Copies::kChunks; c += Copies::kLanes) {
        auto* const words =
            reinterpret_cast<uint32_t*>(values + operand_byte(kLayout.v_panel, row, c));
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
          const uint32_t two = words[w];
          if (!not_finite(two, kExponent)) continue;
          non_finite |= 1u << (i * Copies::kOfWarp + thread() % kWarp / Copies::kLanes);
          words[w] = ((two & kExponent) == kExponent ? 0 : two & 0xFFFFu) |
                     ((two >> 16 & kExponent) == kExponent ? 0 : two & 0xFFFF0000u);
        }
      }
    }
    return non_finite;
  }

  ManyRowsState& state_;
  const RowTile& tile_;
  const ProducerKeys<T> keys_;
  uint32_t syncs_ = 0;
  uint32_t seen_from_, seen_to_;   // keys that all rows see, counted as the walk does
  LaneTile now_ = {}, next_ = {};  // of the stage that is copied, and of the one after it
  LevelTable table_k_, table_v_;
};

}  // namespace gyre::cuda
