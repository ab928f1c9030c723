#pragma once
// Attention of draft tokens: what the producer warps do. Stages are copied as they are stored, some
// ahead, and unpacked to operands: K to [column][coordinate], V to [coordinate][key].
#include "cuda/kernels/attention/drafts_state.cuh"
#include "cuda/kernels/attention/value_pair.cuh"

namespace gyre::cuda {

// Sixteen codes of a key, two steps' worth of eight: words of its planes.
template <uint32_t kK>
struct KeyChunk {
  static constexpr uint32_t kLow = abi::kv_low_bits(kK), kHigh = abi::kv_high_bits(kK);
  uint2 low, next = {}, high = {};

  KeyChunk() = default;
  KeyChunk(const unsigned char* row, uint32_t dim, uint32_t chunk) {
    constexpr uint32_t kGroup = abi::kv_group(kLow),
                       kHighGroup = abi::kv_group(kHigh == 0 ? 1 : kHigh);
    const uint32_t word = key_word<kK>(chunk / 2), two = chunk % 2 * 8;
    low = *reinterpret_cast<const uint2*>(row + word * 16 + two);
    if constexpr (kK == abi::kTq8)
      next = *reinterpret_cast<const uint2*>(row + word * 16 + 16 + two);
    if constexpr (kHigh != 0) {
      const unsigned char* const plane = row + dim * kLow / 8;
      high = *reinterpret_cast<const uint2*>(plane + word * kGroup / kHighGroup * 16 + two);
      const uint32_t by = word * kGroup % kHighGroup / 16 * kHigh;
      high.x >>= by, high.y >>= by;
    }
  }
  uint4 operand(uint32_t chunk) const {
    constexpr LevelTable kTable = level_table<kK, true>();
    const Operands<1> a = unpack_key<kK, true>(kTable, low.x, next.x, high.x, chunk / 2),
                      b = unpack_key<kK, true>(kTable, low.y, next.y, high.y, chunk / 2);
    return make_uint4(a.term[0][0], a.term[0][1], b.term[0][0], b.term[0][1]);
  }
};

template <class T>
class DraftProducer {
 public:
  static constexpr DraftsLayout kLayout = T::kLayout;

  explicit DraftProducer(DraftsState& state)
      : state_(state), p_(state.call), args_(state.args), share_(p_, args_, kLayout.blocks) {}

  void run() {
    if (share_.count == 0) return;
    if (warp() == 0) describe(0);
    DraftSlot<kLayout.slots> slot;
    uint32_t stored = 0, index = 0, stage = 0, end = 0;
    // Stage m is copied, and stage m - kBefore handed over.
    constexpr uint32_t kBefore = kLayout.stored - 1;
#pragma unroll 1
    for (uint32_t m = 0;; ++m) {
      copy_wait<kBefore - 1>();
      // All of the stage is there, and nobody reads the one before it any more.
      sync_named_barrier<kProducers / kWarp>(0);
      copy_stage();
      if (m < kBefore) continue;
      if (stage == end) {
        if (index == share_.count) break;
        const DraftStages of = run_stages(state_.run(index++).of);
        stage = optimization_barrier(of.begin), end = optimization_barrier(of.end);
      }
      wait_for_phase(&state_.empty[slot.index], slot.phase ^ 1);
      const unsigned char* const from = stored_stage(stored);
      unpack_scales(state_.run(index - 1).of, stage, from, draft_scales<T>(slot.index));
      unpack_keys(from, draft_slot<T>(slot.index));
      unpack_values_stage(from + kLayout.v_at, draft_slot<T>(slot.index) + kLayout.k_bytes);
      fence_operands();
      arrive(&state_.full[slot.index]);
      slot.step();
      stored = optimization_barrier(stored + 1 == kLayout.stored ? 0 : stored + 1);
      ++stage;
    }
    copy_wait<0>();
  }

 private:
  static uint32_t thread() { return threadIdx.x - T::kConsumers; }
  static uint32_t warp() { return thread() / kWarp; }
  static uint32_t lane() { return threadIdx.x % kWarp; }
  static unsigned char* stored_stage(uint32_t index) {
    return dynamic_shared() + kLayout.stored_at + index * kLayout.stored_bytes;
  }

  // Copies the description of one of the block's runs. For the first producer warp.
  void describe(uint32_t index) {
    if (index >= share_.count) return;
    DraftRun& to = state_.run(index);
    const uint64_t from =
        args_.at[abi::arg_schedule] +
        4 * (abi::schedule_runs_at(gridDim.x) + uint64_t{share_.first + index} * abi::kRunWords);
    if (lane() < abi::kRunWords)
      reinterpret_cast<uint32_t*>(&to.of)[lane()] = load_bits(from, lane(), true);
    if (lane() == abi::kRunWords) to.bad = 0;
    __syncwarp();
    if (lane() == 0) arrive(&state_.described[index % kDraftRuns]);
  }

  // The run whose stages are copied now. The one behind it is described meanwhile.
  void begin_run() {
    copied_run_ = next_run_++;
    ended_ = copied_run_ == share_.count;
    if (ended_) return;
    state_.wait_for_run(copied_run_);
    if (warp() == 0) describe(copied_run_ + 1);
    const abi::AttentionRun& run = state_.run(copied_run_).of;
    const DraftStages of = run_stages(run);
    stage_ = optimization_barrier(of.begin), end_stage_ = optimization_barrier(of.end);
    begin_ = run.begin, end_ = run.end > run.begin ? run.end : 0;
    entries_ = args_.at[abi::arg_table] +
               (run.sequence * p_.table.stride + p_.table.first_entry) * sizeof(uint32_t);
    kv_head_ = run.kv_head;
    find_tile();
  }

  // Where this lane's tile of the next stage lies. One stage ahead: the page table is slow to read.
  void find_tile() {
    const uint32_t at = stage_ * kDraftTiles + lane() % kDraftTiles;
    present_ = (at + 1) * abi::kKvTile > begin_ && at * abi::kKvTile < end_;
    page_ = 0;
    if (!present_) return;
    const uint32_t page_tiles = p_.table.page_tokens / abi::kKvTile;
    uint32_t entry = page_tiles == 1 ? at : __umulhi(at, p_.table.page_inverse);
    tile_ = at - entry * page_tiles;
    if (p_.table.ring_entries != 0) entry %= p_.table.ring_entries;
    page_ = load_bits(entries_, entry, true);
  }
  // Entries are device data: one that is no page is not used, and shows in the rows.
  uint64_t page_offset() {
    if (page_ >= p_.table.pages) {
      atomicOr(&state_.run(copied_run_).bad, 1u);
      page_ = 0;
    }
    return page_ * p_.table.page_stride;
  }

  // Copies of the next stage, if there is one.
  void copy_stage() {
    if (!ended_ && stage_ == end_stage_) begin_run();
    if (!ended_) {
      using enum abi::AttentionArg;
      unsigned char* const to = stored_stage(copied_);
      const uint64_t page = page_offset();
      const uint32_t there = __ballot_sync(kAll, present_ ? 1 : 0);
      copy_codes<kLayout.k_tile_bytes>(args_.at[arg_k_codes], p_.k, page, there, to);
      copy_codes<kLayout.v_tile_bytes>(args_.at[arg_v_codes], p_.v, page, there, to + kLayout.v_at);
      if (warp() == 0 && lane() < 2 * kDraftTiles && present_) {
        const bool keys = lane() < kDraftTiles;
        const abi::KvCacheLayout& half = keys ? p_.k : p_.v;
        const uint64_t k_scales = args_.at[arg_k_scales], v_scales = args_.at[arg_v_scales];
        const uint64_t from = (keys ? k_scales : v_scales) + page +
                              kv_head_ * half.scales_head_stride + tile_ * half.scales_tile_stride;
        copy_async<16>(shared_address(to + kLayout.k_scales_at + lane() * 16),
                       pointer<const uint8_t>(from), true);
      }
      if (++stage_ != end_stage_) find_tile();
    }
    copy_commit();
    copied_ = optimization_barrier(copied_ + 1 == kLayout.stored ? 0 : copied_ + 1);
  }
  template <uint32_t kTileBytes>
  void copy_codes(uint64_t codes, const abi::KvCacheLayout& half, uint64_t page, uint32_t there,
                  unsigned char* to) const {
    constexpr uint32_t kChunks = kTileBytes / 16;
    static_assert(kDraftTiles * kChunks % kWarp == 0);  // a warp's lanes go on together
    const uint64_t mine =
        codes + page + kv_head_ * half.codes_head_stride + tile_ * half.codes_tile_stride;
#pragma unroll 4
    for (uint32_t c = thread(); c < kDraftTiles * kChunks; c += kProducers) {
      const auto tile = static_cast<int>(c / kChunks);
      const uint32_t low = __shfl_sync(kAll, static_cast<uint32_t>(mine), tile),
                     high = __shfl_sync(kAll, static_cast<uint32_t>(mine >> 32), tile);
      const uint64_t from = (uint64_t{high} << 32 | low) + c % kChunks * 16;
      if ((there >> tile & 1) != 0)
        copy_async<16>(shared_address(to + c * 16), pointer<const uint8_t>(from), true);
    }
  }

  // K's scales as they are, V's as stored, without their bias: weights have room above. A slot that
  // no query sees may hold anything: 0, so that it changes no row's rounding.
  void unpack_scales(const abi::AttentionRun& run, uint32_t stage, const unsigned char* from,
                     float* to) const {
    static_assert(kProducers == 2 * kDraftKeys);
    const uint32_t slot = thread() % kDraftKeys, half = thread() / kDraftKeys;
    const uint32_t key = stage * kDraftKeys + slot;
    const float scale =
        raw_scale(from + kLayout.k_scales_at + (half * kDraftTiles + slot / 8) * 16, 0, slot % 8);
    const bool seen = key >= run.begin && key < run.end;
    to[half * kDraftKeys + T::column(slot)] =
        !seen ? 0.0f : (half == 0 ? scale * 0x1p-31f : scale);
  }
  void unpack_keys(const unsigned char* from, unsigned char* to) const {
    constexpr uint32_t kChunks = T::kKDim / 16, kRow = kLayout.k_tile_bytes / 8,
                       kCount = kDraftKeys * kChunks / kProducers,
                       kAtOnce = kCount < 4 ? kCount : 4;
#pragma unroll 1
    for (uint32_t first = 0; first < kCount; first += kAtOnce) {
      KeyChunk<T::kK> chunks[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t u = thread() + (first + i) * kProducers;
        chunks[i] = {from + u / kChunks * kRow, T::kKDim, u % kChunks};
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t u = thread() + (first + i) * kProducers, chunk = u % kChunks;
        constexpr uint32_t kOfRow = T::kKRow / 16;  // chunks
        *reinterpret_cast<uint4*>(to + chunk / kOfRow * (kDraftKeys * T::kKRow) +
                                  swizzled_byte<T::kKRow>(T::column(u / kChunks), chunk % kOfRow)) =
            chunks[i].operand(chunk);
      }
    }
  }
  // Two coordinates of two tiles at a time: a chunk of the operand each.
  void unpack_values_stage(const unsigned char* from, unsigned char* to) const {
    constexpr LevelTable kTable = level_table<T::kV, true>();
    constexpr uint32_t kHalf = T::kVDim / 2, kCount = kDraftTiles / 2 * kHalf / kProducers,
                       kAtOnce = kCount < 2 ? 1 : 2;
#pragma unroll 1
    for (uint32_t first = 0; first < kCount; first += kAtOnce) {
      ValuePair<T::kV> pairs[kAtOnce][2];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t u = thread() + (first + i) * kProducers, a = u % kHalf;
        const unsigned char* const tile = from + u / kHalf * 2 * kLayout.v_tile_bytes;
        pairs[i][0] = {tile, T::kVDim, a, a + kHalf};
        pairs[i][1] = {tile + kLayout.v_tile_bytes, T::kVDim, a, a + kHalf};
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t u = thread() + (first + i) * kProducers, a = u % kHalf;
        Operands<1> x[2][2];
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t)
          unpack_values<T::kV, true>(kTable, pairs[i][t].low, pairs[i][t].high, 0, x[t]);
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          *reinterpret_cast<uint4*>(to + swizzled_byte<T::kVRow>(a + e * kHalf, u / kHalf)) =
              make_uint4(x[0][e].term[0][0], x[0][e].term[0][1], x[1][e].term[0][0],
                         x[1][e].term[0][1]);
      }
    }
  }

  DraftsState& state_;
  const abi::AttentionParams& p_;
  const Args& args_;
  DraftShare share_;
  // The run whose stages are copied, the one behind it, the place of the next stage.
  uint32_t copied_run_ = 0, next_run_ = 0, copied_ = 0;
  uint32_t stage_ = 0, end_stage_ = 0, begin_ = 0, end_ = 0;
  uint32_t kv_head_ = 0, page_ = 0, tile_ = 0;
  uint64_t entries_ = 0;
  bool ended_ = false, present_ = false;
};

}  // namespace gyre::cuda
