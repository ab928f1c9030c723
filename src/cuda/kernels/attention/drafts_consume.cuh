#pragma once
// Attention of draft tokens: what a consumer warpgroup does. A thread has one row, g of its warp's
// eight, and of each tile of 8 columns two: 2 j and 2 j + 1. Weights are the 16-bit integers of
// weights.cuh, with the same rules for references and fixed-point scales.
#include "cuda/kernels/attention/drafts_merge.cuh"
#include "cuda/kernels/attention/drafts_queries.cuh"
#include "cuda/kernels/attention/many_rows_consume.cuh"

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
        if (has_rows()) {
          float v[kVTiles][2];
          const DraftRowState now = take_sums(v);
          merge_.add_group(run, groups, group, (flags_ & kBad) != 0, now, v);
        }
      }
      merge_.finish_run(run.of, groups);
    }
  }

 private:
  static uint32_t warp() { return threadIdx.x / kWarp; }
  static uint32_t lane_j() { return threadIdx.x % 4; }
  static uint32_t row() { return warp() * kDraftWarpRows + threadIdx.x % kWarp / 4; }
  // The four lanes that share the thread's row.
  static uint32_t row_lanes() { return 15u << (threadIdx.x % kWarp / 4 * 4); }
  // The stage behind a group of the unit, or the run's last.
  static uint32_t group_end(const abi::AttentionRun& run, uint32_t group, uint32_t last) {
    static_assert(abi::kGroupPieces == 4);
    const uint32_t shift = run.shift_and_valid % 256 + 2;
    const uint32_t behind = run.unit_first / abi::kGroupPieces + group + 1;
    const uint32_t end = (behind << shift) / kDraftKeys;
    return optimization_barrier(end < last ? end : last);
  }

  // Warp-uniform: the warp has rows.
  void begin_run(const abi::AttentionRun& run) {
    using enum abi::AttentionArg;
    const uint32_t first = warp() * kDraftWarpRows;
    flags_ = first < run.rows ? kHasRows : 0;
    if (flags_ == 0) return;
    if (p_.soft_cap != 0 || args_.at[arg_alibi_slopes] != 0) flags_ |= kSoft;
    if (run.shift_and_valid < 256 || is_stale(args_, run)) flags_ |= kBad;
    unsigned char* const queries =
        dynamic_shared() + kLayout.warps_at + warp() * kLayout.warp_bytes;
    load_draft_queries<T>(state_, p_, run, args_.at[arg_q], first, queries);
    const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
    for (uint32_t step = 0; step < T::kKDim / 32; ++step)
      ldmatrix(q_[step], shared_address(queries + draft_query_byte<T>(lane / 8 % 2 * 8 + lane % 8,
                                                                      step * 2 + lane / 16)));
    __syncwarp();  // folded rows go where the queries were
    factor_ = (flags_ & kSoft) != 0 ? 1.0f : state_.factor[row()], bias_ = state_.biases[row()];
    begin_limits(run);
  }
  // What few stages ask of the thread's row, to shared memory, and the keys that all of the warp's
  // rows see.
  void begin_limits(const abi::AttentionRun& run) {
    using enum abi::AttentionArg;
    const abi::RowMask<int32_t> mask = run_mask(p_, run);
    const uint32_t r = run.first_row + (row() < run.rows ? row() : run.rows - 1);
    const uint32_t token = r / p_.group;
    const abi::RowBounds<int32_t> own = abi::row_bounds<int32_t>(
        mask, static_cast<int32_t>(token), 0, static_cast<int32_t>(run.length));
    DraftLimits of = {hidden(own.begin), hidden(own.end),
                      hidden(abi::row_position(mask, static_cast<int32_t>(token))), 0};
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
    begin_group();
    wait_together(&state_.full[slot.index], slot.phase);
    begin_scores(draft_slot<T>(slot.index));
    wait_for_mmas();
#pragma unroll 1
    for (uint32_t stage = first; stage < end; ++stage) {
      const uint32_t used = slot.index;
      uint32_t weights[2][4] = {};
      if (has_rows()) weigh(stage, draft_scales<T>(used), weights);
      begin_values(weights, draft_slot<T>(used));
      slot.step();
      if (stage + 1 < end) {
        wait_together(&state_.full[slot.index], slot.phase);
        begin_scores(draft_slot<T>(slot.index));
      }
      wait_for_mmas();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arrive(&state_.empty[used]);
      if (--until_check_ == 0) check_sums();
    }
  }
  void begin_group() {
    reference_ = kLowest, sum_ = 0;
    fixed_ = FixedPoint::none();
    stages_ = 0;
    until_check_ = kChecked;
    dither_ = (static_cast<float>(lane_j()) + 0.5f) * 0.0625f;
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 4; ++i) o_[i / 4][i % 4] = 0;
  }
  void begin_scores(const unsigned char* slot) {
    const SharedAddress at = shared_address(slot);
    wgmma_sums(s_);
    wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < T::kKDim / 32; ++step) {
      constexpr uint32_t kOfRow = T::kKRow / 32;
      wgmma_s8<int8_t, kKeyTiles>(
          s_, q_[step],
          wgmma_operand<T::kKRow>(at + step / kOfRow * (kDraftKeys * T::kKRow) +
                                  step % kOfRow * 32),
          step != 0);
    }
    wgmma_commit();
  }
  void begin_values(const uint32_t (&weights)[2][4], const unsigned char* slot) {
    constexpr uint32_t kColumns = T::kVDim < 128 ? 64 : 128;
    const SharedAddress at = shared_address(slot + kLayout.k_bytes);
    wgmma_sums(o_);
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < 2 * (T::kVDim / kColumns); ++i) {
      const uint32_t step = i % 2, first = i / 2 * kColumns;
      wgmma_s8<uint8_t, kColumns / 8>(o_ + first / 8, weights[step],
                                      wgmma_operand<T::kVRow>(at + first * T::kVRow + step * 32),
                                      true);
    }
    wgmma_commit();
  }
  void wait_for_mmas() {
    wgmma_wait();
    wgmma_sums(s_);
    wgmma_sums(o_);
  }

  // Scores of a stage to the A fragments of its weights.
  void weigh(uint32_t stage, const float* scales, uint32_t (&a)[2][4]) {
    float x[kKeyTiles][2];
    const auto* const k_scales = reinterpret_cast<const float2*>(scales) + lane_j();
    const float2* const v_scales = k_scales + kDraftKeys / 2;
    constexpr int32_t kStep = T::FormK::kStep;
#pragma unroll
    for (uint32_t t = 0; t < kKeyTiles; ++t) {
      const float2 scale = k_scales[t * 4];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        // Below 2^31: 256 coordinates, 7 bits of level, 14 of the query.
        const int32_t sum = s_[t][e] * (256 * kStep) + (s_[t][2 + e] * kStep - bias_);
        x[t][e] = static_cast<float>(sum) * (e == 0 ? scale.x : scale.y);
      }
    }
    if (soft()) apply_soft_cap(stage, x);
    if (!all_seen(stage)) apply_mask(stage, x);
    uint32_t w[kKeyTiles][2];
    float sum;
    const uint32_t raised =
        __ballot_sync(kAll, softmax_weights<false>(x, v_scales, w, sum) ? 0 : 1);
    if (raised != 0) {
      raise_reference((raised & row_lanes()) != 0, x, v_scales);
      softmax_weights<true>(x, v_scales, w, sum);
    }
    sum_ = sum;
    if constexpr (T::FormV::kBias != 0) {
#pragma unroll
      for (uint32_t t = 0; t < kKeyTiles; ++t) fixed_.weight_sum += w[t][0] + w[t][1];
    }
    ++stages_;
    dither_ += dither_ < 0.0954915f ? 0.1545085f : -0.0954915f;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t t = i * 2, first = permute(w[t][0], w[t][1], 0x5140),
                     last = permute(w[t + 1][0], w[t + 1][1], 0x5140);
      a[i / 2][i % 2 * 2] = permute(first, last, 0x7632);
      a[i / 2][i % 2 * 2 + 1] = permute(first, last, 0x5410);
    }
  }

  // Probabilities relative to the reference, times V's scales, in fixed point. False: a weight does
  // not fit. `kCareful`: whatever the numbers are; the same bits where both are possible.
  template <bool kCareful>
  bool softmax_weights(const float (&x)[kKeyTiles][2], const float2* v_scales,
                       uint32_t (&w)[kKeyTiles][2], float& sum) const {
    const float factor = factor_, fixed = fixed_.scale;
    const float dithers[4] = {dither_, dither_ + 0.25f, dither_ + 0.5f, dither_ + 0.75f};
    uint32_t all = 0;
    float more = 0;
#pragma unroll
    for (uint32_t t = 0; t < kKeyTiles; ++t) {
      const float2 scales = v_scales[t * 4];
      float p[2];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        p[e] = exp2_fast(fmaf(x[t][e], factor, -reference_));
        const float scale = (e == 0 ? scales.x : scales.y) * fixed,
                    dither = dithers[(t * 2 + e) % 4];
        w[t][e] = to_integer(fmaf(p[e], scale, dither));
        if constexpr (kCareful)
          w[t][e] = careful_weight(p[e], e == 0 ? scales.x : scales.y, dither);
        all |= w[t][e];
      }
      more += p[0] + p[1];
    }
    sum = sum_ + more;
    return all < kTooLarge && sum < 0x1p64f;
  }
  // The scale of a slot without a key may be NaN, or never written.
  uint32_t careful_weight(float p, float v_scale, float dither) const {
    const float fixed = fixed_.scale, scale = v_scale * fixed;
    if (p == 0 || is_nan(fixed)) return kIntegers;
    if (fixed == 0) return kIntegers + (p * v_scale == -minus_infinity() ? 1u : 0u);
    return to_integer(is_finite(scale) ? fmaf(p, scale, dither) : fmaf(p * v_scale, fixed, dither));
  }

  // Adapts a row's reference and fixed-point scale to a stage, and its sums to these. `mine`: the
  // thread's row is one that asks for it; others keep theirs, whatever their neighbours do.
  void raise_reference(bool mine, const float (&x)[kKeyTiles][2], const float2* v_scales) {
    const float factor = factor_;
    // A lane's keys may all be hidden, where the sums over V are of all four lanes' keys.
    const bool held = (__ballot_sync(kAll, sum_ != 0 ? 1 : 0) & row_lanes()) != 0;
    float largest = minus_infinity();
#pragma unroll
    for (uint32_t i = 0; i < kKeyTiles * 2; ++i) largest = fmaxf(largest, x[i / 2][i % 2]);
    largest = warp_max<4>(largest) * factor;
    uint32_t shift = 0;
    if (mine && largest - reference_ > kFarAbove - kReferenceHeadroom) {
      const float up = ceilf(fmaxf(largest, kLowest)) + kReferenceHeadroom;
      shift = static_cast<uint32_t>(fminf(up - reference_, 512.0f));
      sum_ = shift > 126 ? 0.0f : sum_ * power_of_two(-static_cast<int32_t>(shift));
      reference_ = up;
    }
    float most = 0;
    bool known = true;
#pragma unroll
    for (uint32_t t = 0; t < kKeyTiles; ++t) {
      const float2 scales = v_scales[t * 4];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float p = exp2_fast(fmaf(x[t][e], factor, -reference_));
        const float weight = p == 0 ? 0.0f : p * (e == 0 ? scales.x : scales.y);
        most = fmaxf(most, weight);
        known = known && !is_nan(weight);
      }
    }
    most = warp_max<4>(most);
    const bool unknown = (__ballot_sync(kAll, known ? 0 : 1) & row_lanes()) != 0;
    if (!mine) return;
    // A stage has so many keys that few of later ones have much larger weights.
    shift = rescale_weights<3>(fixed_, most, shift);
    if (unknown) fixed_.scale = __uint_as_float(0x7FC00000u);
    if (shift != 0 && held) rescale_sums(shift);
  }
  // What the bits of kIntegers add to the thread's sum of weights.
  uint32_t surplus() const { return stages_ * (2 * kKeyTiles) * kIntegers; }
  // Divides sums by 2^shift, to the nearest. The remainder of the hi bytes' sum goes to the lo
  // bytes'.
  void rescale_sums(uint32_t shift) {
    constexpr uint32_t kMost = 48, kStep = 16;  // 48 leave nothing of a sum; 16 fit in 32-bit sums
    auto weights = static_cast<int32_t>(fixed_.weight_sum - surplus());
#pragma unroll 1
    for (uint32_t left = shift < kMost ? shift : kMost; left != 0;) {
      const uint32_t by = left < kStep ? left : kStep;
      const int32_t half = 1 << (by - 1), rest = (1 << by) - 1;
#pragma unroll
      for (uint32_t i = 0; i < kVTiles * 2; ++i) {
        int32_t &hi = o_[i / 2][i % 2], &lo = o_[i / 2][2 + i % 2];
        lo = (lo + (hi & rest) * 256 + half) >> by;
        hi >>= by;
      }
      weights = (weights + half) >> by;
      left -= by;
    }
    fixed_.weight_sum = static_cast<uint32_t>(weights) + surplus();
  }
  // A key adds up to 127 times 255 to a sum. Sums are checked so often that rescale_sums, after at
  // most halving them, has room in 32 bits.
  static constexpr uint32_t kChecked = 256;
  static_assert(2 * int64_t{127 * 255 * kDraftKeys} * kChecked + (1 << 24) + (1 << 15) < int64_t{1}
                                                                                             << 31);
  void check_sums() {
    until_check_ = kChecked;
    uint32_t all = 4 * (fixed_.weight_sum - surplus());
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 4; ++i) {
      const int32_t x = o_[i / 4][i % 4];
      all |= static_cast<uint32_t>(x < 0 ? -x : x);
    }
    if ((__ballot_sync(kAll, all >= 1u << 29 ? 1 : 0) & row_lanes()) == 0) return;
    fixed_.scale *= 0.5f;
    rescale_sums(1);
  }

  // Code-motion barriers: the compiler would make copies of the loop over stages for every
  // condition that it finds invariant, or monotonic.
  bool has_rows() const { return (code_motion_barrier(flags_) & kHasRows) != 0; }
  bool soft() const { return (code_motion_barrier(flags_) & kSoft) != 0; }
  // Warp-uniform: all of the warp's rows see all keys of the stage.
  bool all_seen(uint32_t stage) const {
    const auto begin = static_cast<int32_t>(code_motion_barrier(stage * kDraftKeys));
    return begin >= seen_from_ && begin + static_cast<int32_t>(kDraftKeys) <= seen_to_;
  }
  // The key of column 8 t + 2 j + e.
  int32_t key_of(uint32_t stage, uint32_t t, uint32_t e) const {
    return static_cast<int32_t>(stage * kDraftKeys + T::position(t * 8 + lane_j() * 2 + e));
  }
  // A soft cap and slopes: scores become logits in base 2.
  void apply_soft_cap(uint32_t stage, float (&x)[kKeyTiles][2]) const {
    const float cap = p_.soft_cap, inverse = 1.0f / cap;
    const DraftLimits of = state_.limits[row()];
    const float factor = state_.factor[row()];
#pragma unroll
    for (uint32_t i = 0; i < kKeyTiles * 2; ++i) {
      float y = x[i / 2][i % 2] * factor;
      if (cap > 0) y = soft_cap_fast(y, cap, inverse) * kLog2E;
      const int32_t key = key_of(stage, i / 2, i % 2);
      x[i / 2][i % 2] =
          of.slope == 0 ? y : fmaf(of.slope, static_cast<float>(key - of.position), y);
    }
  }
  // Rolled, where it can be: it is for few stages.
  void apply_mask(uint32_t stage, float (&x)[kKeyTiles][2]) const {
    const DraftLimits of = state_.limits[row()];
    uint32_t seen = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kKeyTiles * 2; ++i) {
      const int32_t key = key_of(stage, i / 2, i % 2);
      seen |= (key >= of.begin && key < of.end ? 1u : 0u) << i;
    }
#pragma unroll
    for (uint32_t i = 0; i < kKeyTiles * 2; ++i)
      if ((seen >> i & 1) == 0) x[i / 2][i % 2] = minus_infinity();
  }

  // The group's sums as floats, and its state.
  DraftRowState take_sums(float (&v)[kVTiles][2]) const {
    using Form = typename T::FormV;
    constexpr float kUnit = 0x1p-31f;  // the bias of V's scales
    uint32_t weights = fixed_.weight_sum - surplus();
    float sum = sum_;
#pragma unroll
    for (int by = 1; by < 4; by *= 2) {
      weights += __shfl_xor_sync(kAll, weights, by);
      sum += __shfl_xor_sync(kAll, sum, by);
    }
    // What the bias adds, times the sum of weights, is subtracted while numbers are exact, or
    // small.
    const uint32_t upper = weights / 256 * Form::kBias;
    const float lower = static_cast<float>(weights % 256 * Form::kBias) * kUnit;
    const float inverse = inverse_scale(fixed_.scale);
#pragma unroll
    for (uint32_t i = 0; i < kVTiles * 2; ++i) {
      const int32_t hi = o_[i / 2][i % 2], lo = o_[i / 2][2 + i % 2];
      const auto rest = static_cast<int32_t>(static_cast<uint32_t>(hi) * Form::kStep - upper);
      v[i / 2][i % 2] =
          __fmul_rn(__fmaf_rn(static_cast<float>(rest), 256 * kUnit,
                              __fmaf_rn(static_cast<float>(lo), Form::kStep * kUnit, -lower)),
                    inverse);
    }
    return {reference_, sum};
  }

  DraftsState& state_;
  const abi::AttentionParams& p_;
  const Args& args_;
  DraftMerge<T> merge_;
  static constexpr uint32_t kHasRows = 1, kSoft = 2, kBad = 4;
  uint32_t flags_ = 0;  // of the warp and the run
  int32_t seen_from_ = 0, seen_to_ = 0, bias_ = 0;
  float factor_ = 0;
  // The row's sums and scales, of one group.
  float reference_ = 0, sum_ = 0, dither_ = 0;
  FixedPoint fixed_ = {};
  uint32_t stages_ = 0, until_check_ = 0;
  uint32_t q_[T::kKDim / 32][4] = {};
  int32_t s_[kKeyTiles][4] = {}, o_[kVTiles][4] = {};
};

}  // namespace gyre::cuda
