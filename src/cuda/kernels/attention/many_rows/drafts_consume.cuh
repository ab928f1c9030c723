#pragma once
// Attention of draft tokens: what a consumer warpgroup does. A warp has 8 rows. Up to 16 rows need
// half of the warps: the others have the same rows, and each half takes one half of every stage's
// keys, with sums of its own that are folded at the end of a group.
#include "cuda/kernels/attention/common/wgmma_s8_instructions.cuh"
#include "cuda/kernels/attention/many_rows/drafts_merge.cuh"
#include "cuda/kernels/attention/many_rows/drafts_queries.cuh"
#include "cuda/kernels/attention/many_rows/drafts_softmax.cuh"

namespace gyre::cuda {

template <class T>
class DraftConsumer {
 public:
  static constexpr DraftsLayout kLayout = T::kLayout;
  static constexpr uint32_t kVTiles = T::kVTiles, kKeyTiles = T::kKeyTiles;

  explicit DraftConsumer(DraftsState& state)
      : state_(state), p_(state.call), args_(state.args), merge_(state) {}

  // All runs of the block.
  void run() {
    const uint32_t count = BlockRuns(p_, args_, kLayout.blocks).count;
    DraftSlot<kLayout.slots> slot;
#pragma unroll 1
    for (uint32_t index = 0; index < count; ++index) {
      state_.wait_for_run(index);
      const DraftRun& run = state_.run(index);
      begin_run(run.of);
      const RunGroups groups(run.of);
      DraftStages left = run_stages(run.of);
#pragma unroll 1
      for (uint32_t group = groups.first; group < groups.end; ++group) {
        const uint32_t end = group_end(run.of, group, left.end);
        attend(left.begin, end, slot);
        left.begin = end;
        if (has_rows()) end_group(run, groups, group);
      }
    }
  }

 private:
  static uint32_t warp() { return threadIdx.x / kWarp; }
  static uint32_t lane_j() { return threadIdx.x % 4; }
  // The index of the thread's row in shared memory.
  static uint32_t row() { return warp() * kDraftWarpRows + threadIdx.x % kWarp / 4; }
  // The stage behind a group of the work item, or the run's last.
  static uint32_t group_end(const abi::AttentionRun& run, uint32_t group, uint32_t last) {
    const uint32_t shift = run.shift + run.group_shift;
    const uint32_t behind = (run.item_first >> run.group_shift) + group + 1;
    const uint32_t end = (behind << shift) / kDraftKeys;
    return optimization_barrier(end < last ? end : last);
  }

  // Warp-uniform: the warp has rows.
  void begin_run(const abi::AttentionRun& run) {
    using enum abi::AttentionArg;
    const bool halves = run.rows <= 2 * kDraftWarpRows && warp() < 4;
    const uint32_t first = (halves ? warp() % 2 : warp()) * kDraftWarpRows;
    flags_ = first < run.rows ? kHasRows : 0;
    if (flags_ == 0) return;
    if (halves) flags_ |= warp() < 2 ? kFirstHalf : kSecondHalf;
    if (p_.soft_cap != 0 || args_.at[arg_alibi_slopes] != 0) flags_ |= kSoft;
    const bool stale = begin_queries(run, first);
    if (run.valid == 0 || stale) flags_ |= kBad;
  }
  // Queries to A fragments. Warps that have the same rows convert one half of them each.
  bool begin_queries(const abi::AttentionRun& run, uint32_t first) {
    const uint32_t half = flags_ & (kFirstHalf | kSecondHalf), lane = threadIdx.x % kWarp;
    const auto buffer = [](uint32_t of) {
      return dynamic_shared() + kLayout.warps_at + of * kLayout.warp_bytes;
    };
    const bool stale = load_draft_queries<T>(state_, run, first, warp() * kDraftWarpRows,
                                             half == 0 ? 2 : half / kSecondHalf, buffer(warp()));
    const auto sync = [&] {
      if (half != 0) {
        merge_.sync_halves();
      } else {
        __syncwarp();
      }
    };
    sync();
    // The warp that has row g.
    const auto owner = [&](uint32_t g) {
      return half == 0 ? warp() : warp() % 2 + g / (kDraftWarpRows / 2) * 2;
    };
    const unsigned char* const from = buffer(owner(lane % 8));
#pragma unroll
    for (uint32_t step = 0; step < T::kKDim / 32; ++step)
      ldmatrix(q_[step], shared_address(from + draft_query_byte<T>(lane / 8 % 2 * 8 + lane % 8,
                                                                   step * 2 + lane / 16)));
    const uint32_t place = owner(lane / 4) * kDraftWarpRows + lane / 4;
    const float factor = state_.factor[place];
    bias_ = state_.biases[place];
    sums_.begin_run((flags_ & kSoft) != 0 ? 1.0f : factor);
    begin_limits(run, first + lane / 4, factor);
    sync();  // folded rows go where the queries were
    return stale;
  }
  // What few stages ask of the thread's row, to shared memory, and the keys that all of the warp's
  // rows see.
  void begin_limits(const abi::AttentionRun& run, uint32_t own_row, float factor) {
    using enum abi::AttentionArg;
    const abi::RowMask<int32_t> mask = run_mask(p_, run);
    const uint32_t r = run.first_row + (own_row < run.rows ? own_row : run.rows - 1);
    const uint32_t token = r / p_.group;
    const abi::RowBounds<int32_t> own = abi::row_bounds<int32_t>(
        mask, static_cast<int32_t>(token), 0, static_cast<int32_t>(run.length));
    DraftLimits of = {hidden(own.begin), hidden(own.end),
                      hidden(abi::row_position(mask, static_cast<int32_t>(token))), 0, factor};
    if (args_.at[arg_alibi_slopes] != 0)
      of.slope = __uint_as_float(load_bits(args_.at[arg_alibi_slopes],
                                           run.kv_head * p_.group + r - token * p_.group, true)) *
                 kLog2E;
    if (lane_j() == 0) state_.limits[row()] = of;
    __syncwarp();
    int32_t from = of.begin, to = of.end;
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
      const int32_t begin = __shfl_xor_sync(kAll, from, by), end = __shfl_xor_sync(kAll, to, by);
      from = begin > from ? begin : from, to = end < to ? end : to;
    }
    seen_from_ = hidden(from), seen_to_ = hidden(to);
  }
  static int32_t hidden(int32_t x) {
    return static_cast<int32_t>(optimization_barrier(static_cast<uint32_t>(x)));
  }

  // Keys of a group: QK, softmax, PV, stage by stage. The next QK is issued behind PV.
  void attend(uint32_t first, uint32_t end, DraftSlot<kLayout.slots>& slot) {
    sums_.begin_group();
    wait_together(&state_.full[slot.index], slot.phase);
    begin_scores(draft_slot<T>(slot.index));
    wait_for_mmas();
#pragma unroll 1
    for (uint32_t stage = first; stage < end; ++stage) {
      const uint32_t used = slot.index;
      uint32_t weights[2][4] = {};
      stage_weights(stage, draft_scales<T>(used), weights);
      begin_values(weights, draft_slot<T>(used));
      slot.step();
      if (stage + 1 < end) {
        wait_together(&state_.full[slot.index], slot.phase);
        begin_scores(draft_slot<T>(slot.index));
      }
      wait_for_mmas();
      arrive_warp(&state_.empty[used]);
      sums_.count_stage();
    }
  }
  void begin_scores(const unsigned char* slot) {
    const SharedAddress at = uniform_address(shared_address(slot));
    wgmma_sums(s_);
    wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < T::kKDim / 32; ++step) {
      constexpr uint32_t kOfRow = T::kKRow / 32;
      wgmma_s8<int8_t, kKeyTiles>(
          s_, q_[step],
          wgmma_operand<T::kKRow>(at, step / kOfRow * (kDraftKeys * T::kKRow) + step % kOfRow * 32),
          step != 0);
    }
    wgmma_commit();
  }
  void begin_values(const uint32_t (&weights)[2][4], const unsigned char* slot) {
    constexpr uint32_t kColumns = T::kVDim < 128 ? 64 : 128;
    const SharedAddress at = uniform_address(shared_address(slot));
    wgmma_sums(sums_.of_values);
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < 2 * (T::kVDim / kColumns); ++i) {
      const uint32_t step = i % 2, first = i / 2 * kColumns;
      wgmma_s8<uint8_t, kColumns / 8>(
          sums_.of_values + first / 8, weights[step],
          wgmma_operand<T::kVRow>(at, kLayout.k_bytes + first * T::kVRow + step * 32), true);
    }
    wgmma_commit();
  }
  void wait_for_mmas() {
    wgmma_wait();
    wgmma_sums(s_);
    wgmma_sums(sums_.of_values);
  }

  // The stage's weights of the warp's rows and keys; 0 for others.
  void stage_weights(uint32_t stage, const float* scales, uint32_t (&weights)[2][4]) {
    // A code-motion barrier: the compiler would make copies of the loop for every flag.
    const uint32_t flags = code_motion_barrier(flags_);
    if ((flags & kHasRows) == 0) return;
    if ((flags & kFirstHalf) != 0) {
      keys_weights<kKeyTiles / 2, 0>(stage, scales, weights);
    } else if ((flags & kSecondHalf) != 0) {
      keys_weights<kKeyTiles / 2, kKeyTiles / 2>(stage, scales, weights);
    } else {
      keys_weights<kKeyTiles, 0>(stage, scales, weights);
    }
  }
  // Weights of kTiles tiles of keys from kFirst on.
  template <uint32_t kTiles, uint32_t kFirst>
  void keys_weights(uint32_t stage, const float* scales, uint32_t (&weights)[2][4]) {
    float x[kTiles][2];
    const auto* const k_scales = reinterpret_cast<const float2*>(scales) + lane_j() + kFirst * 4;
    constexpr int32_t kStep = T::FormK::kStep;
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const float2 scale = k_scales[t * 4];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const int32_t hi = s_[kFirst + t][e], lo = s_[kFirst + t][2 + e];
        // Below 2^31: 256 coordinates, 7 bits of level, 14 of the query.
        const int32_t sum = hi * (256 * kStep) + (lo * kStep - bias_);
        x[t][e] = static_cast<float>(sum) * (e == 0 ? scale.x : scale.y);
      }
    }
    if (soft()) apply_soft_cap<kFirst>(stage, x);
    if (!all_seen(stage)) apply_mask<kFirst>(stage, x);
    sums_.template to_weights<kTiles>(x, k_scales + kDraftKeys / 2, weights + kFirst / 4);
  }

  // Folds the sums of a group. The second half's go through its warp's shared memory.
  void end_group(const DraftRun& run, const RunGroups& groups, uint32_t group) {
    float v[kVTiles][2];
    DraftRowState now = sums_.take(v);
    const uint32_t half = flags_ & (kFirstHalf | kSecondHalf);
    if (half == kSecondHalf) merge_.put_half(now, v);
    if (half != 0) merge_.sync_halves();
    if (half == kFirstHalf) merge_.add_half(now, v);
    if (half != 0) merge_.sync_halves();
    if (half != kSecondHalf) merge_.add_group(run, groups, group, (flags_ & kBad) != 0, now, v);
  }

  bool has_rows() const { return (code_motion_barrier(flags_) & kHasRows) != 0; }
  bool soft() const { return (code_motion_barrier(flags_) & kSoft) != 0; }
  // Warp-uniform: all of the warp's rows see all keys of the stage.
  bool all_seen(uint32_t stage) const {
    const auto begin = static_cast<int32_t>(code_motion_barrier(stage * kDraftKeys));
    return begin >= seen_from_ && begin + static_cast<int32_t>(kDraftKeys) <= seen_to_;
  }
  // The key of column 8 t + 2 j + e.
  static int32_t key_of(uint32_t stage, uint32_t t, uint32_t e) {
    return static_cast<int32_t>(stage * kDraftKeys + T::position(t * 8 + lane_j() * 2 + e));
  }
  // A soft cap and slopes: scores become logits in base 2.
  template <uint32_t kFirst, uint32_t kTiles>
  void apply_soft_cap(uint32_t stage, float (&x)[kTiles][2]) const {
    const float cap = p_.soft_cap, inverse = 1.0f / cap;
    const DraftLimits of = state_.limits[row()];
    const float factor = of.factor;
#pragma unroll
    for (uint32_t i = 0; i < kTiles * 2; ++i) {
      float y = x[i / 2][i % 2] * factor;
      if (cap > 0) y = soft_cap_fast(y, cap, inverse) * kLog2E;
      const int32_t key = key_of(stage, kFirst + i / 2, i % 2);
      x[i / 2][i % 2] =
          of.slope == 0 ? y : fmaf(of.slope, static_cast<float>(key - of.position), y);
    }
  }
  // Rolled, where it can be: it is for few stages.
  template <uint32_t kFirst, uint32_t kTiles>
  void apply_mask(uint32_t stage, float (&x)[kTiles][2]) const {
    const DraftLimits of = state_.limits[row()];
    uint32_t seen = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kTiles * 2; ++i) {
      const int32_t key = key_of(stage, kFirst + i / 2, i % 2);
      seen |= (key >= of.begin && key < of.end ? 1u : 0u) << i;
    }
#pragma unroll
    for (uint32_t i = 0; i < kTiles * 2; ++i)
      if ((seen >> i & 1) == 0) x[i / 2][i % 2] = minus_infinity();
  }

  DraftsState& state_;
  const abi::AttentionParams& p_;
  const Args& args_;
  DraftMerge<T> merge_;
  static constexpr uint32_t kHasRows = 1, kSoft = 2, kBad = 4, kFirstHalf = 8, kSecondHalf = 16;
  uint32_t flags_ = 0;  // of the warp and the run
  int32_t seen_from_ = 0, seen_to_ = 0, bias_ = 0;
  DraftSums<T> sums_;
  uint32_t q_[T::kKDim / 32][4] = {};
  int32_t s_[kKeyTiles][4] = {};  // QK: hi bytes of the query, then lo
};

}  // namespace gyre::cuda
