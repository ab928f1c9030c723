#pragma once
// Attention of many rows: what a consumer warpgroup does. A thread has two rows, g and g + 8 of its
// warp's 16, and of each tile of 8 columns two: 2 j and 2 j + 1.
#include "cuda/kernels/attention/many_rows/multipliers.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/output.cuh"
#include "cuda/kernels/attention/many_rows/row_sums.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

template <class T>
class Consumer {
 public:
  static constexpr ManyRowsLayout kLayout = T::kLayout;
  // Weights ask for V's scales.
  static constexpr bool kWaitsForV = T::kLevelsV && !T::kScalesWithKeys;
  static constexpr bool kPlainLoop = T::kGroups == 2;  // others take NVRTC minutes

  Consumer(ManyRowsState& state, const Args& args, uint32_t group)
      : state_(state), tile_(state.tile), group_(group) {
    using enum abi::AttentionArg;
    tree_ = pointer<const uint8_t>(args.at[arg_tree_mask]);
    if (args.at[arg_tree_mask] == 0 || tile_.paged()) tree_ = nullptr;
    soft_ = tile_.params.soft_cap != 0 || args.at[arg_alibi_slopes] != 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) start_row(i, args.at[arg_alibi_slopes]);
    // Positions whose keys all of the group's rows see, if the walk has one part.
    const uint32_t first = first_row(), last = first + kGroupRows - 1;
    const int64_t from = tile_.bounds(token_of(last < tile_.rows ? last : tile_.rows - 1)).begin;
    int64_t to = tile_.bounds(token_of(first)).end;
    if (tree_ != nullptr) {
      const int64_t tree_mask = abi::row_position(tile_.mask, int64_t{0});
      to = to < tree_mask ? to : tree_mask;
    }
    const auto skip = static_cast<int64_t>(tile_.walk.skip);
    seen_from_ = to_position(from - tile_.walk_key + skip);
    seen_to_ = to_position(to - tile_.walk_key + skip);
    wraps_ = tile_.walk.tiles != tile_.walk.tiles_a;
    plain_from_ = (static_cast<uint32_t>(seen_from_) + T::kKeys - 1) / T::kKeys;
    plain_to_ = wraps_ || soft_ ? 0 : static_cast<uint32_t>(seen_to_) / T::kKeys;
  }

  // Stages whose keys all rows see and have multiplier 1, without soft cap and slopes, have a loop
  // of their own: code that is jumped over costs a loop as much as its own instructions. Both loops
  // give the same bits.
  void run() {
    const uint32_t stages = tile_.stage_count();
    if (stages == 0) return;
    Scores scores;
    begin_stage(scores);
    wait_for_product(scores.s);
    release(scores.k.slot);
    uint32_t stage = 0;
    if constexpr (kPlainLoop) {
#pragma unroll 1
      while (true) {
        const uint32_t plain = stage < plain_from_ ? stage : plain_to_;
#pragma unroll 1
        for (; stage < plain && stage + 1 < stages && !has_multipliers(scores, stage); ++stage)
          run_stage<true>(scores, stage, false);
        if (stage + 1 == stages) break;
        run_stage<false>(scores, stage++, false);
      }
      run_stage<false>(scores, stage, true);
    } else {
#pragma unroll 1
      for (; stage < stages; ++stage) run_stage<false>(scores, stage, stage + 1 == stages);
    }
  }

  // The two rows to global memory.
  void write(const Args& args) {
    if constexpr (T::kLevelsV) restore_columns<T::kVDim>(o_, kOperandUnit);
    // Code-motion barriers: addresses would be computed before the loop, and kept.
    const uint32_t j = code_motion_barrier(threadIdx.x % 4);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t r = code_motion_barrier(row(i));
      const float sum = warp_sum<4>(rows_[i].sum);
      SoftmaxState state = {rows_[i].reference, sum};
      if (T::kTakesRuns && state_.older != 0) {
        if (r < tile_.rows)
          fold_older<T>(state_.older + r * uint64_t{T::kVDim + 2} * 4, i, state, o_);
        __syncwarp();  // the state goes where the older one was
      }
      if (r >= tile_.rows) continue;
      uint64_t place = state_.states;
      if (place != 0) place += r * uint64_t{T::kVDim + 2} * 4;
      const RowWriter writer(tile_, args, r, state, j == 0, place);
      if (writer.has_pairs()) {
#pragma unroll
        for (uint32_t t = 0; t < T::kVTiles; ++t)
          writer.put_pair(t * 8 + 2 * j, o_[t][2 * i], o_[t][2 * i + 1]);
      } else {
#pragma unroll
        for (uint32_t t = 0; t < T::kVTiles * 2; ++t)
          writer.put(t / 2 * 8 + 2 * j + t % 2, o_[t / 2][2 * i + t % 2]);
      }
    }
  }

 private:
  // The newest scores, and the slot of their keys.
  struct Scores {
    SlotCursor<kLayout.slots> k;
    float s[T::kKeyTiles][4];
  };
  void begin_stage(Scores& scores) {
    const unsigned char* const q =
        dynamic_shared() + kLayout.q + group_ * panels_of(T::kKDim) * kLayout.q_panel;
    wait_for_phase(&state_.full[scores.k.slot], scores.k.phase);
    begin_scores<T>(q, slot(scores.k.slot), scores.s);
  }
  // Whether a key of the stage whose scores are the newest has a multiplier but 1.
  bool has_multipliers(const Scores& scores, uint32_t stage) const {
    if constexpr (kWaitsForV) {
      const SlotCursor<kLayout.slots> v = scores.k.next();
      wait_for_phase(&state_.full[v.slot], v.phase);
    }
    if constexpr (!T::kLevelsK && !T::kLevelsV) return false;
    return *reinterpret_cast<const uint32_t*>(key_info<T>(stage) + kLayout.not_one) != 0;
  }
  // Weights and PV of a stage. The next scores are begun behind PV: the tensor cores do not pause
  // between them.
  template <bool kPlain>
  void run_stage(Scores& scores, uint32_t stage, bool last) {
    const SlotCursor<kLayout.slots> v = scores.k.next();
    uint32_t p[T::kKeys / 16][4];
    if constexpr (kWaitsForV) wait_for_phase(&state_.full[v.slot], v.phase);
    float rescale[2] = {1.0f, 1.0f};
    if (weighs<kPlain>()) softmax_weights<kPlain>(stage, key_info<T>(stage), scores.s, rescale);
    if (__builtin_expect(__any_sync(kAll, rescale[0] != 1.0f || rescale[1] != 1.0f) != 0, 0)) {
#pragma unroll
      for (uint32_t i = 0; i < T::kVTiles * 4; ++i) o_[i / 4][i % 4] *= rescale[i % 4 / 2];
    }
    to_operand<kPlain>(scores.s, p);
    if constexpr (!kWaitsForV) wait_for_phase(&state_.full[v.slot], v.phase);
    begin_values<ValueOperand<T>>(p, slot(v.slot), o_);
    scores.k = v.next();
    if (!last) begin_stage(scores);
    wait_for_product(o_);
    wait_for_product(scores.s);
    if constexpr (!T::kLevelsV && !kPlain) {
      if (__builtin_expect(!all_seen(stage), 0)) add_not_finite(stage);
    }
    release(v.slot);
    if (!last) release(scores.k.slot);
  }
  static uint32_t in_group(uint32_t i) {
    return threadIdx.x / kWarp % 4 * 16 + threadIdx.x % kWarp / 4 + 8 * i;
  }
  uint32_t first_row() const { return group_ * kGroupRows; }
  uint32_t row(uint32_t i) const { return first_row() + in_group(i); }
  uint64_t token_of(uint32_t r) const { return tile_.token(r < tile_.rows ? r : 0); }
  unsigned char* slot(uint32_t index) const {
    return dynamic_shared() + kLayout.slot + index * kLayout.slot_bytes;
  }
  void release(uint32_t index) { arrive_warp(&state_.empty[index]); }

  RowLimits& limits(uint32_t i) const { return state_.limits[group_ * kGroupRows + in_group(i)]; }
  void start_row(uint32_t i, uint64_t alibi_slopes) {
    const uint32_t r = row(i);
    const uint64_t token = token_of(r);
    const abi::RowBounds<int64_t> b = tile_.bounds(token);
    const int64_t position = abi::row_position(tile_.mask, static_cast<int64_t>(token));
    const bool sloped = alibi_slopes != 0 && r < tile_.rows;
    limits(i) = {to_position(b.begin - tile_.walk_key), to_position(b.end - tile_.walk_key),
                 static_cast<int32_t>(position - tile_.walk_key),
                 sloped ? pointer<const float>(alibi_slopes)[tile_.head(r)] * kLog2E : 0.0f};
    rows_[i] = {state_.factor[group_ * kGroupRows + in_group(i)], minus_infinity(),
                minus_infinity(), 0.0f, kMinScaleExponent};
  }

  // Warp-uniform. A code-motion barrier: the compiler would make two copies of the loop.
  bool has_rows() const {
    return code_motion_barrier(first_row() + threadIdx.x / kWarp % 4 * 16) < tile_.rows;
  }
  // Blocks of 128 rows seldom have warps without.
  template <bool kPlain>
  bool weighs() const {
    return (kPlain && T::kGroups == 2) || has_rows();
  }
  // Whether all rows of the group see all keys of the stage.
  bool all_seen(uint32_t stage) const {
    const auto begin = static_cast<int32_t>(stage * T::kKeys);
    if (!wraps_) return begin >= seen_from_ && begin + static_cast<int32_t>(T::kKeys) <= seen_to_;
    return false;
  }

  // Scores become weights, relative to the largest so far, times V's multipliers over levels;
  // `rescale` is the factor of what was there.
  template <bool kPlain>
  void softmax_weights(uint32_t stage, const unsigned char* keys, float (&s)[T::kKeyTiles][4],
                       float (&rescale)[2]) {
    // Multipliers are rare: without one, what the code below skips would multiply by 1.
    const bool multiplied =
        !kPlain && *reinterpret_cast<const uint32_t*>(keys + kLayout.not_one) != 0;
    if constexpr (T::kLevelsK && !kPlain) {
      if (__builtin_expect(multiplied, 0)) scale_scores<T>(keys, s);
    }
    const bool soft = !kPlain && soft_;
    if (__builtin_expect(soft, 0)) apply_soft_cap(keys, s);
    float max_scale[2] = {1, 1};
    const bool hidden = !kPlain && !all_seen(stage);
    if (__builtin_expect(hidden, 0)) apply_mask(keys, s);
    if constexpr (T::kLevelsV && !kPlain) {
      if (__builtin_expect(multiplied, 0)) find_max_multiplier<T>(keys, hidden, s, max_scale);
    }
    constexpr uint32_t kChains = 4;  // a maximum waits for the one before it
    float max[2][kChains];
#pragma unroll
    for (uint32_t i = 0; i < 2 * kChains; ++i) max[i / kChains][i % kChains] = minus_infinity();
#pragma unroll
    for (uint32_t i = 0; i < T::kKeyTiles * 4; ++i) {
      float& chain = max[i % 4 / 2][i / 4 % 2 * 2 + i % 2];
      chain = fmaxf(chain, s[i / 4][i % 4]);
    }
    float factor[2], reference[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      RowSums& r = rows_[i];
      const float newest =
          warp_max<4>(fmaxf(fmaxf(max[i][0], max[i][1]), fmaxf(max[i][2], max[i][3])));
      r.max = fmaxf(r.max, newest);
      factor[i] = soft ? 1.0f : r.factor;
      // A row that sees no key of the stage has no scale.
      if (T::kLevelsV && hidden && !multiplied && newest == minus_infinity()) max_scale[i] = 0;
      if constexpr (T::kLevelsV)
        r.scale_exponent = fmaxf(r.scale_exponent, scale_exponent_of(max_scale[i]));
      float next = r.max == minus_infinity() ? minus_infinity()
                                             : r.max * factor[i] - T::kWeightExponent +
                                                   (T::kLevelsV ? r.scale_exponent : 0.0f);
      // The sums are seldom rescaled: a reference stays while weights are in range.
      if (next - r.reference <= kWeightLag) next = r.reference;
      reference[i] = SoftmaxState::reference(next);
      rescale[i] = exp2_fast(r.reference - reference[i]);
      r.reference = next;
      r.sum *= rescale[i];
    }
    float sum[2][2] = {};  // two chains
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        s[t][i] = exp2_fast(fmaf(s[t][i], factor[i / 2], -reference[i / 2]));
        sum[i / 2][i % 2] += s[t][i];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) rows_[i].sum += sum[i][0] + sum[i][1];
    if constexpr (T::kLevelsV && !kPlain) {
      if (__builtin_expect(multiplied, 0)) scale_weights<T>(keys, s);
    }
  }

  // A soft cap and slopes: scores become logits in base 2.
  void apply_soft_cap(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) const {
    const auto* const numbers =
        reinterpret_cast<const int2*>(keys + kLayout.numbers) + threadIdx.x % 4;
    const float cap = tile_.params.soft_cap, inverse = 1.0f / cap;
    const RowLimits of[2] = {limits(0), limits(1)};
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float x = s[t][i] * rows_[i / 2].factor;
        if (cap > 0) x = soft_cap_fast(x, cap, inverse) * kLog2E;
        const int32_t key = i % 2 == 0 ? number.x : number.y;
        const RowLimits& r = of[i / 2];
        s[t][i] = r.slope == 0 ? x : fmaf(r.slope, static_cast<float>(key - r.position), x);
      }
    }
  }

  // Which of the thread's scores count, a bit each, where a tree hides keys. Rolled: it is rare.
  uint64_t seen_in_tree(const unsigned char* keys) const {
    const auto* const numbers =
        reinterpret_cast<const int2*>(keys + kLayout.numbers) + threadIdx.x % 4;
    const RowLimits of[2] = {limits(0), limits(1)};
    uint64_t seen = 0;
#pragma unroll 1
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (sees(of[i / 2], i / 2, i % 2 == 0 ? number.x : number.y))
          seen |= uint64_t{1} << (4 * t + i);
    }
    return seen;
  }
  bool sees(const RowLimits& of, uint32_t i, int32_t key) const {
    if (key < of.begin || key >= of.end) return false;
    if (tree_ == nullptr) return true;
    return !abi::tree_hides(tree_ + token_of(row(i)) * tile_.params.tree_stride, tile_.mask,
                            tile_.walk_key + key);
  }
  void apply_mask(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) const {
    if (tree_ != nullptr) {
      const uint64_t seen = seen_in_tree(keys);
#pragma unroll
      for (uint32_t i = 0; i < T::kKeyTiles * 4; ++i)
        if ((seen >> i & 1) == 0) s[i / 4][i % 4] = minus_infinity();
    }
    const auto* const numbers =
        reinterpret_cast<const int2*>(keys + kLayout.numbers) + threadIdx.x % 4;
    const RowLimits of[2] = {limits(0), limits(1)};
    const uint32_t count[2] = {
        of[0].end > of[0].begin ? static_cast<uint32_t>(of[0].end - of[0].begin) : 0,
        of[1].end > of[1].begin ? static_cast<uint32_t>(of[1].end - of[1].begin) : 0};
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        // Slots without a key have the number -1.
        const auto from =
            static_cast<uint32_t>((i % 2 == 0 ? number.x : number.y) - of[i / 2].begin);
        if (from >= count[i / 2]) s[t][i] = minus_infinity();
      }
    }
  }

  // Values that the producers left out, to the rows that see their keys: whatever the weight, they
  // are infinite or NaN.
  void add_not_finite(uint32_t stage) {
    using Copies = RowCopies<T::kVDim>;
#pragma unroll 1
    for (uint32_t warp = 0; warp < kProducers / kWarp; ++warp) {
#pragma unroll 1
      for (uint32_t non_finite =
               reinterpret_cast<const uint32_t*>(key_info<T>(stage) + kLayout.maxima)[warp];
           non_finite != 0; non_finite &= non_finite - 1) {
        const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int32_t>(non_finite))) - 1;
        const Copies of(warp * kWarp + bit % Copies::kOfWarp * Copies::kLanes);
        const uint32_t tile = bit / Copies::kOfWarp * Copies::kTilesAtOnce + of.tile;
        add_value(stage * T::kKeys + tile * 8 + of.row);
      }
    }
  }
  void add_value(uint32_t position) {
    constexpr uint32_t kExponent = T::kV == kFormatF16 ? 0x7C00u : 0x7F80u;
    const auto key = static_cast<int32_t>(tile_.key_of(position) - tile_.walk_key);
    const auto* const row = reinterpret_cast<const uint32_t*>(
        tile_.v_codes + tile_.row_offset(position, tile_.params.v.codes_tile_stride));
    const bool seen[2] = {sees(limits(0), 0, key), sees(limits(1), 1, key)};
#pragma unroll
    for (uint32_t t = 0; t < T::kVTiles; ++t) {
      const uint32_t two = row[t * 4 + threadIdx.x % 4];
      if (!not_finite(two, kExponent)) continue;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t bits = i % 2 == 0 ? two & 0xFFFFu : two >> 16;
        if (seen[i / 2] && (bits & kExponent) == kExponent) o_[t][i] += as_float(bits, T::kV);
      }
    }
  }

  // Weights to the A operand; zeros where the warp has no rows.
  template <bool kPlain>
  void to_operand(const float (&s)[T::kKeyTiles][4], uint32_t (&p)[T::kKeys / 16][4]) const {
    const bool rows = weighs<kPlain>();
#pragma unroll
    for (uint32_t i = 0; i < T::kKeys / 4; ++i) {
      const float* const of = &s[i / 2][i % 2 * 2];
      p[i / 4][i % 4] = rows ? pack_16(of[0], of[1], T::kBf16V) : 0;
    }
  }

  ManyRowsState& state_;
  const RowTile& tile_;
  const uint32_t group_;
  const uint8_t* tree_;
  bool soft_, wraps_;
  int32_t seen_from_, seen_to_;
  uint32_t plain_from_, plain_to_;  // stages
  RowSums rows_[2];
  float o_[T::kVTiles][4] = {};
};

}  // namespace gyre::cuda
