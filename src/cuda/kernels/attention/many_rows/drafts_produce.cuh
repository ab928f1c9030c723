#pragma once
// Attention of draft tokens: what the producer warps do. Stages are copied as they are stored, some
// ahead, and unpacked to operands: K to [column][coordinate], V to [coordinate][key].
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/common/wgmma_s8.cuh"
#include "cuda/kernels/attention/many_rows/drafts_state.cuh"

namespace gyre::cuda {

// Where a thread's 16 codes of a key lie in its row: those of two steps' worth of eight.
template <uint32_t kK>
struct KeyPlaces {
  static constexpr uint32_t kLow = abi::kv_low_bits(kK), kHigh = abi::kv_high_bits(kK);
  uint32_t low, high, shift;

  KeyPlaces(uint32_t dim, uint32_t chunk) {
    constexpr uint32_t kGroup = abi::kv_group(kLow),
                       kHighGroup = abi::kv_group(kHigh == 0 ? 1 : kHigh);
    const uint32_t word = key_word<kK>(chunk / 2), two = chunk % 2 * 8;
    low = word * 16 + two;
    high = dim * kLow / 8 + word * kGroup / kHighGroup * 16 + two;
    shift = word * kGroup % kHighGroup / 16 * kHigh;
  }
};
template <uint32_t kK>
struct KeyChunk {
  uint2 low, next = {}, high = {};

  KeyChunk() = default;
  KeyChunk(const unsigned char* row, const KeyPlaces<kK>& at) {
    low = *reinterpret_cast<const uint2*>(row + at.low);
    if constexpr (kK == abi::kTq8) next = *reinterpret_cast<const uint2*>(row + at.low + 16);
    if constexpr (KeyPlaces<kK>::kHigh != 0) {
      high = *reinterpret_cast<const uint2*>(row + at.high);
      high.x >>= at.shift, high.y >>= at.shift;
    }
  }
  uint4 operand(const LevelTable& table, uint32_t chunk) const {
    const Operands<1> a = unpack_key<kK, true>(table, low.x, next.x, high.x, chunk / 2),
                      b = unpack_key<kK, true>(table, low.y, next.y, high.y, chunk / 2);
    return make_uint4(a.term[0][0], a.term[0][1], b.term[0][0], b.term[0][1]);
  }
};

// What a thread unpacks of every stage, as byte offsets. They are computed once: of later keys and
// tiles the offsets differ by constants, because their bits are others.
template <class T>
struct DraftPlaces {
  static constexpr uint32_t kKeyChunks = T::kKDim / 16, kKeyStep = kProducers / kKeyChunks,
                            kHalf = T::kVDim / 2, kPairStep = kProducers / kHalf;
  static_assert(kKeyStep % 8 == 0 && kProducers % kHalf == 0);
  KeyPlaces<T::kK> key;
  uint32_t chunk;             // of every key
  uint32_t key_from, key_to;  // of the first one
  uint32_t pair, value_to;    // a pair of tiles; its operand
  uint32_t coordinate;        // and the one kHalf on
  uint32_t scale_from, scale_to;

  explicit DraftPlaces(uint32_t thread)
      : key(T::kKDim, thread % kKeyChunks),
        chunk(thread % kKeyChunks),
        pair(thread / kHalf),
        coordinate(thread % kHalf) {
    constexpr DraftsLayout kLayout = T::kLayout;
    constexpr uint32_t kOfRow = T::kKRow / 16;  // chunks
    key_from = thread / kKeyChunks * (kLayout.k_tile_bytes / 8);
    key_to = pin(chunk / kOfRow * (kDraftKeys * T::kKRow) +
                 swizzled_byte<T::kKRow>(T::column(thread / kKeyChunks), chunk % kOfRow));
    value_to = pin(kLayout.k_bytes + swizzled_byte<T::kVRow>(coordinate, pair));
    const uint32_t slot = thread % kDraftKeys, half = thread / kDraftKeys;
    scale_from = kLayout.k_scales_at + (half * kDraftTiles + slot / 8) * 16 + slot % 8 * 2;
    scale_to = pin((half * kDraftKeys + T::column(slot)) * 4);
  }
  // Where the operand of the i-th key, and of the i-th pair of tiles, goes.
  uint32_t key_operand(uint32_t i) const {
    const uint32_t rows = T::column(i * kKeyStep);
    constexpr uint32_t kBits = T::kKRow == 128 ? 7 : 6;
    const uint32_t swizzle = (rows & kBits) * (T::kKRow == 128 ? 16 : 8);
    return (key_to ^ swizzle) + rows * T::kKRow;
  }
  uint32_t value_operand(uint32_t i) const { return value_to ^ i * kPairStep * 16; }
};

template <class T>
class DraftProducer {
 public:
  static constexpr DraftsLayout kLayout = T::kLayout;

  explicit DraftProducer(DraftsState& state)
      : state_(state),
        p_(state.call),
        args_(state.args),
        thread_(pin(threadIdx.x - T::kConsumers)),
        first_run_(load_first_run()),
        share_(p_, args_, kLayout.blocks),
        places_(thread_),
        table_k_(load_table<T::kK, true>(state.table_k)),
        table_v_(T::kK == T::kV ? table_k_ : load_table<T::kV, true>(state.table_v)) {
    part_bytes_ = chosen<uint32_t>(warp(), {kLayout.k_tile_bytes, kLayout.v_tile_bytes, 16, 16});
    part_at_ =
        chosen<uint32_t>(warp(), {0, kLayout.v_at, kLayout.k_scales_at, kLayout.v_scales_at}) +
        lane() % kDraftTiles * part_bytes_;
    together_ = tiles_together();
  }

  void run() {
    if (share_.count == 0) return;
    if (warp() == 0) describe(0, first_run_);
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < kLayout.stored; ++i) copy_stage();
    DraftSlot<kLayout.slots> slot;
    DraftSlot<kLayout.stored> stored;
#pragma unroll 1
    for (uint32_t index = 0; index < share_.count; ++index) {
      state_.wait_for_run(index);
      const abi::AttentionRun& run = state_.run(index).of;
      const DraftStages of = run_stages(run);
      seen_from_ = run.begin, seen_to_ = run.end;
#pragma unroll 1
      for (uint32_t stage = of.begin; stage < of.end; ++stage) {
        // The stage is there, and nobody reads the one before it any more.
        wait_together(&state_.loaded[stored.index], stored.phase);
        sync_named_barrier<kProducers / kWarp>(0);
        copy_stage();
        wait_together(&state_.empty[slot.index], slot.phase ^ 1);
        unpack(stage, dynamic_shared() + kLayout.stored_at + stored.index * kLayout.stored_bytes,
               slot.index);
        fence_operands();
        arrive(&state_.full[slot.index]);
        slot.step();
        stored.step();
      }
    }
  }

 private:
  static constexpr uint32_t kBatch = kWarp / kDraftTiles;
  static_assert(kProducers == 4 * kWarp && kWarp % kDraftTiles == 0);

  uint32_t warp() const { return thread_ / kWarp; }
  uint32_t lane() const { return thread_ % kWarp; }

  // A lane's word of the block's first run, beside the loads that say whether there is one.
  uint32_t load_first_run() const {
    const uint64_t from =
        args_.at[abi::arg_schedule] +
        4 * (abi::schedule_first_runs_at(gridDim.x) +
             uint64_t{BlockRuns::share(kLayout.blocks)} * abi::kFirstRuns * abi::kRunWords);
    return warp() == 0 && lane() < abi::kRunWords ? load_bits(from, lane(), true) : 0;
  }
  // Hands over the description of one of the block's runs, a word by each lane. For the first warp.
  void describe(uint32_t index, uint32_t word) {
    DraftRun& to = state_.run(index);
    if (lane() < abi::kRunWords) reinterpret_cast<uint32_t*>(&to.of)[lane()] = word;
    if (lane() == abi::kRunWords) to.invalid = 0;
    arrive_warp(&state_.described[index % kDraftRuns]);
  }
  void describe(uint32_t index) {
    if (index >= share_.count) return;
    const uint64_t from =
        args_.at[abi::arg_schedule] +
        4 * (abi::schedule_runs_at(gridDim.x) + uint64_t{share_.first + index} * abi::kRunWords);
    describe(index, lane() < abi::kRunWords ? load_bits(from, lane(), true) : 0);
  }

  // The run whose stages are copied now. The one behind it is described meanwhile.
  void begin_run() {
    using enum abi::AttentionArg;
    copied_run_ = next_run_++;
    ended_ = copied_run_ == share_.count;
    if (ended_) return;
    state_.wait_for_run(copied_run_);
    if (warp() == 0) describe(copied_run_ + 1);
    const abi::AttentionRun& run = state_.run(copied_run_).of;
    const DraftStages of = run_stages(run);
    stage_ = of.begin, end_stage_ = of.end, in_batch_ = 0;
    begin_ = run.begin, end_ = run.end > run.begin ? run.end : 0;
    entries_ = args_.at[arg_table] + (run.sequence * p_.table.stride + p_.table.first_entry) * 4;
    // Four parts of a tile, each a warp's: codes of K and V, their scales.
    const uint64_t of_parts[4] = {args_.at[arg_k_codes] + run.kv_head * p_.k.codes_head_stride,
                                  args_.at[arg_v_codes] + run.kv_head * p_.v.codes_head_stride,
                                  args_.at[arg_k_scales] + run.kv_head * p_.k.scales_head_stride,
                                  args_.at[arg_v_scales] + run.kv_head * p_.v.scales_head_stride};
    from_ = chosen(warp(), of_parts);
    stride_ = chosen(warp(), {p_.k.codes_tile_stride, p_.v.codes_tile_stride,
                              p_.k.scales_tile_stride, p_.v.scales_tile_stride});
    find_tiles(stage_);
  }

  template <class X>
  static X chosen(uint32_t part, const X (&of)[4]) {
    const X first = part == 0 ? of[0] : of[1], last = part == 2 ? of[2] : of[3];
    return part < 2 ? first : last;
  }

  // Tiles that lie one behind the other and are copied as one: of a page, of a stage.
  uint32_t tiles_together() const {
    const bool gaps = p_.k.codes_tile_stride != kLayout.k_tile_bytes ||
                      p_.v.codes_tile_stride != kLayout.v_tile_bytes ||
                      (p_.k.scales_tile_stride | p_.v.scales_tile_stride) != 16;
    const uint32_t page_tiles = p_.table.page_tokens / abi::kKvTile | kDraftTiles;
    return gaps ? 1 : page_tiles & (0 - page_tiles);
  }

  // Pages of the next kBatch stages, a tile by each lane. One batch ahead: the table is slow to
  // read.
  void find_tiles(uint32_t stage) {
    const uint32_t first = lane() % kDraftTiles;
    const uint32_t of = stage + lane() / kDraftTiles, at = of * kDraftTiles + first;
    found_ = of < end_stage_ && first % together_ == 0 &&
             (at + together_) * abi::kKvTile > begin_ && at * abi::kKvTile < end_;
    page_ = 0;
    if (!found_) return;
    const uint32_t page_tiles = p_.table.page_tokens / abi::kKvTile;
    uint32_t entry = page_tiles == 1 ? at : __umulhi(at, p_.table.page_inverse);
    tile_ = at - entry * page_tiles;
    if (p_.table.ring_entries != 0) entry %= p_.table.ring_entries;
    page_ = load_bits(entries_, entry, true);
  }
  // What was found becomes addresses. Entries are device data: one that is no page is not used, and
  // shows in the rows.
  void begin_batch() {
    if (page_ >= p_.table.pages) {
      atomicOr(&state_.run(copied_run_).invalid, 1u);
      page_ = 0;
    }
    address_ = from_ + page_ * p_.table.page_stride + tile_ * stride_;
    present_ = found_;
    there_ = __ballot_sync(kAll, present_ ? 1 : 0);
    find_tiles(stage_ + kBatch);
  }

  // Copies of the next stage, if there is one: the warp's part of it, some tiles by each lane.
  void copy_stage() {
    if (!ended_ && stage_ == end_stage_) begin_run();
    if (ended_) return;
    if (in_batch_ == 0) begin_batch();
    PhaseBarrier* const loaded = &state_.loaded[copied_.index];
    if (present_ && lane() / kDraftTiles == in_batch_)
      copy_bulk(shared_address(dynamic_shared() + kLayout.stored_at + part_at_ +
                               copied_.index * kLayout.stored_bytes),
                address_, together_ * part_bytes_, loaded);
    const uint32_t there = there_ >> in_batch_ * kDraftTiles & ((1u << kDraftTiles) - 1);
    if (lane() == 0)
      arrive_expecting(loaded, static_cast<uint32_t>(__popc(there)) * together_ * part_bytes_);
    copied_.step();
    in_batch_ = ++stage_ == end_stage_ ? 0 : (in_batch_ + 1) % kBatch;
    __syncwarp();
  }

  void unpack(uint32_t stage, const unsigned char* from, uint32_t slot) const {
    unpack_scales(stage, from, reinterpret_cast<unsigned char*>(draft_scales<T>(slot)));
    unpack_keys(from, draft_slot<T>(slot));
    unpack_values_stage(from + kLayout.v_at, draft_slot<T>(slot));
  }
  // K's scales as they are, V's as stored, without their bias: weights have room above. A slot that
  // no query sees may hold anything: 0, so that it changes no row's rounding.
  void unpack_scales(uint32_t stage, const unsigned char* from, unsigned char* to) const {
    static_assert(kProducers == 2 * kDraftKeys);
    const uint32_t key = stage * kDraftKeys + thread_ % kDraftKeys;
    const float scale = raw_scale(from + places_.scale_from, 0, 0);
    const bool seen = key >= seen_from_ && key < seen_to_;
    *reinterpret_cast<float*>(to + places_.scale_to) =
        !seen ? 0.0f : (thread_ < kDraftKeys ? scale * 0x1p-31f : scale);
  }
  void unpack_keys(const unsigned char* from, unsigned char* to) const {
    using Places = DraftPlaces<T>;
    constexpr uint32_t kCount = kDraftKeys / Places::kKeyStep, kAtOnce = kCount < 4 ? kCount : 4,
                       kRow = kLayout.k_tile_bytes / 8;
    from += places_.key_from;
#pragma unroll
    for (uint32_t first = 0; first < kCount; first += kAtOnce) {
      KeyChunk<T::kK> chunks[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        chunks[i] = {from + (first + i) * Places::kKeyStep * kRow, places_.key};
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        *reinterpret_cast<uint4*>(to + places_.key_operand(first + i)) =
            chunks[i].operand(table_k_, places_.chunk);
    }
  }
  // Two coordinates of two tiles at a time: a chunk of the operand each.
  void unpack_values_stage(const unsigned char* from, unsigned char* to) const {
    using Places = DraftPlaces<T>;
    constexpr uint32_t kHalf = Places::kHalf, kTile = kLayout.v_tile_bytes,
                       kCount = kDraftTiles / 2 / Places::kPairStep, kAtOnce = kCount < 2 ? 1 : 2;
    from += places_.pair * 2 * kTile;
#pragma unroll
    for (uint32_t first = 0; first < kCount; first += kAtOnce) {
      ValuePair<T::kV> pairs[kAtOnce][2];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * 2; ++i) {
        const uint32_t tile = (first + i / 2) * Places::kPairStep * 2 + i % 2;
        pairs[i / 2][i % 2] = {from + tile * kTile, T::kVDim, places_.coordinate,
                               places_.coordinate + kHalf};
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        Operands<1> x[2][2];
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t)
          unpack_values<T::kV, true>(table_v_, pairs[i][t].low, pairs[i][t].high, 0, x[t]);
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          *reinterpret_cast<uint4*>(to + places_.value_operand(first + i) + e * kHalf * T::kVRow) =
              make_uint4(x[0][e].term[0][0], x[0][e].term[0][1], x[1][e].term[0][0],
                         x[1][e].term[0][1]);
      }
    }
  }

  DraftsState& state_;
  const abi::AttentionParams& p_;
  const Args& args_;
  uint32_t thread_;  // of the producers
  uint32_t first_run_;
  BlockRuns share_;
  DraftPlaces<T> places_;
  LevelTable table_k_, table_v_;
  // The run whose stages are copied, the one behind it, the place of the warp's next part.
  uint32_t copied_run_ = 0, next_run_ = 0;
  DraftSlot<kLayout.stored> copied_;
  uint32_t stage_ = 0, end_stage_ = 0, begin_ = 0, end_ = 0;
  uint64_t entries_ = 0, from_ = 0, stride_ = 0;  // of the run's sequence and KV head
  // The lane's tile of a batch of stages: where it lies, and which lanes have one; of the next.
  uint64_t address_ = 0;
  uint32_t in_batch_ = 0, there_ = 0, page_ = 0, tile_ = 0;
  uint32_t part_bytes_, part_at_;  // of the lane's part of a tile
  uint32_t together_;
  bool ended_ = false, present_ = false, found_ = false;
  uint32_t seen_from_ = 0, seen_to_ = 0;  // keys of the run that is unpacked
};

}  // namespace gyre::cuda
