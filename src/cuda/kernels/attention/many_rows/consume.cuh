#pragma once
// Attention of many rows: what a consumer warpgroup does. A thread has two rows, g and g + 8 of its
// warp's 16, and of each tile of 8 columns two: 2 j and 2 j + 1.
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"
#include "cuda/kernels/attention/many_rows/output.cuh"

namespace gyre::cuda {

// One of a thread's two rows.
struct RowSums {
  float factor;     // of its scores
  float most;       // largest score so far, or logit in base 2 where these are softened
  float reference;  // of its weights, in base 2
  float sum;        // of this thread's weights
  float top;        // scales of V so far are below 2 to this
};

constexpr int32_t to_position(int64_t x) {
  constexpr int64_t kMost = 0x7FFFFFFF;
  return static_cast<int32_t>(x < 0 ? 0 : (x > kMost ? kMost : x));
}

// Scales that are smaller lose bits of their weights; all of V is below 2^-92 then.
constexpr float kLeastTop = -100.0f;
inline float top_of(float scale) {
  return scale == 0 ? kLeastTop : static_cast<float>(exponent_of(scale) + 1);
}

// Weights may end above their top by 2 to this: f16 ends below 2^16.
constexpr float kWeightLag = 7.0f;

template <class T>
class Consumer {
 public:
  static constexpr ManyRowsLayout kLayout = T::kLayout;
  // Weights ask for V's scales.
  static constexpr bool kWaitsForV = T::kLevelsV && !T::kScalesWithKeys;

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
  }

  // The next scores are begun behind a stage's PV: the tensor cores do not pause between them.
  void run() {
    const uint32_t stages = tile_.stage_count();
    if (stages == 0) return;
    SlotCursor<kLayout.slots> k;  // of the newest scores
    float s[T::kKeyTiles][4];
    uint32_t p[T::kKeys / 16][4];
    float keep[2];
    const unsigned char* const q =
        dynamic_shared() + kLayout.q + group_ * panels_of(T::kKDim) * kLayout.q_panel;
    const auto begin_stage = [&] {
      wait_for_phase(&state_.full[k.slot], k.phase);
      begin_scores<T>(q, slot(k.slot), s);
    };
    begin_stage();
    wait_for_product(s);
    release(k.slot);
#pragma unroll 1
    for (uint32_t stage = 0;; ++stage) {
      const SlotCursor<kLayout.slots> v = k.next();
      if constexpr (kWaitsForV) wait_for_phase(&state_.full[v.slot], v.phase);
      keep[0] = keep[1] = 1.0f;
      if (has_rows()) softmax_weights(stage, key_info<T>(stage), s, keep);
      if (__builtin_expect(__any_sync(kAll, keep[0] != 1.0f || keep[1] != 1.0f) != 0, 0)) {
#pragma unroll
        for (uint32_t i = 0; i < T::kVTiles * 4; ++i) o_[i / 4][i % 4] *= keep[i % 4 / 2];
      }
      to_operand(s, p);
      if constexpr (!kWaitsForV) wait_for_phase(&state_.full[v.slot], v.phase);
      begin_values<T>(p, slot(v.slot), o_);
      const bool last = stage + 1 == stages;
      k = v.next();
      if (!last) begin_stage();
      wait_for_product(o_);
      wait_for_product(s);
      if constexpr (!T::kLevelsV) {
        if (__builtin_expect(!all_seen(stage), 0)) add_not_finite(stage);
      }
      release(v.slot);
      if (last) return;
      release(k.slot);
    }
  }

  // The two rows to global memory.
  void write(const Args& args) {
    if constexpr (T::kLevelsV) restore_columns<T::kVDim>(o_);
    // Code-motion barriers: addresses would be computed before the loop, and kept.
    const uint32_t j = code_motion_barrier(threadIdx.x % 4);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t r = code_motion_barrier(row(i));
      const float sum = warp_sum<4>(rows_[i].sum);
      SoftmaxState state = {rows_[i].reference, sum};
      if (T::kTakesRuns && state_.older != 0) {
        if (r < tile_.rows) fold_older(i, r, state);
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
  // The state of the unit's older keys, folded with this one.
  void fold_older(uint32_t i, uint32_t r, SoftmaxState& state) {
    const uint64_t from = state_.older + r * uint64_t{T::kVDim + 2} * 4;
    const float2 of = load_l2<float2>(from + T::kVDim * 4);
    SoftmaxState older = {of.x, of.y};
    const SoftmaxState::Factors f = older.fold(state);
    state = older;
#pragma unroll
    for (uint32_t t = 0; t < T::kVTiles; ++t) {
      const float2 x = load_l2<float2>(from + (t * 8 + threadIdx.x % 4 * 2) * 4);
      o_[t][2 * i] = f.fold(x.x, o_[t][2 * i]);
      o_[t][2 * i + 1] = f.fold(x.y, o_[t][2 * i + 1]);
    }
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
                minus_infinity(), 0.0f, kLeastTop};
  }

  // Warp-uniform. A code-motion barrier: the compiler would make two copies of the loop.
  bool has_rows() const {
    return code_motion_barrier(first_row() + threadIdx.x / kWarp % 4 * 16) < tile_.rows;
  }
  // Whether all rows of the group see all keys of the stage.
  bool all_seen(uint32_t stage) const {
    const auto begin = static_cast<int32_t>(stage * T::kKeys);
    if (!wraps_) return begin >= seen_from_ && begin + static_cast<int32_t>(T::kKeys) <= seen_to_;
    return false;
  }

  // Scores become weights, relative to the largest so far, times V's scales over levels; `keep` is
  // the factor of what was there.
  void softmax_weights(uint32_t stage, const unsigned char* keys, float (&s)[T::kKeyTiles][4],
                       float (&keep)[2]) {
    const uint32_t j = threadIdx.x % 4;
    if constexpr (T::kLevelsK) {
      const auto* const scales = reinterpret_cast<const float2*>(keys + kLayout.scales) + j;
#pragma unroll
      for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
        const float2 scale = scales[t * 4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) s[t][i] *= i % 2 == 0 ? scale.x : scale.y;
      }
    }
    if (__builtin_expect(soft_, 0)) apply_soft_cap(keys, s);
    float scale_top[2] = {0, 0};
    const bool hidden = !all_seen(stage);
    if (__builtin_expect(hidden, 0)) {
      apply_mask(keys, s, scale_top);
    } else if constexpr (T::kLevelsV) {
      const float4 tops = *reinterpret_cast<const float4*>(keys + kLayout.tops);
      scale_top[0] = scale_top[1] = fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w));
    }
    float most[2][2] = {{rows_[0].most, s[0][1]}, {rows_[1].most, s[0][3]}};  // two chains
#pragma unroll
    for (uint32_t i = 0; i < T::kKeyTiles * 4; ++i)
      most[i % 4 / 2][i % 2] = fmaxf(most[i % 4 / 2][i % 2], s[i / 4][i % 4]);
    float factor[2], reference[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      RowSums& r = rows_[i];
      r.most = warp_max<4>(fmaxf(most[i][0], most[i][1]));
      factor[i] = soft_ ? 1.0f : r.factor;
      if constexpr (T::kLevelsV) r.top = fmaxf(r.top, top_of(scale_top[i]));
      float top = r.most == minus_infinity()
                      ? minus_infinity()
                      : r.most * factor[i] - T::kWeightTop + (T::kLevelsV ? r.top : 0.0f);
      // The sums are seldom rescaled: a reference stays while weights are in range.
      if (top - r.reference <= kWeightLag) top = r.reference;
      reference[i] = SoftmaxState::reference(top);
      keep[i] = exp2_fast(r.reference - reference[i]);
      r.reference = top;
      r.sum *= keep[i];
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
    if constexpr (T::kLevelsV) {
      if (__builtin_expect(hidden, 0)) {
        scale_weights<true>(keys, s);
      } else {
        scale_weights<false>(keys, s);
      }
    }
  }
  // `kHidden`: some rows do not see some keys, whose scales may be NaN, or never written.
  template <bool kHidden>
  static void scale_weights(const unsigned char* keys, float (&s)[T::kKeyTiles][4]) {
    const auto* const scales =
        reinterpret_cast<const float2*>(keys + kLayout.v_scales) + threadIdx.x % 4;
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const float2 scale = scales[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        s[t][i] = kHidden && s[t][i] == 0 ? 0.0f : s[t][i] * (i % 2 == 0 ? scale.x : scale.y);
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
  // Also finds the largest scale of V that each row sees.
  void apply_mask(const unsigned char* keys, float (&s)[T::kKeyTiles][4], float (&top)[2]) const {
    if (tree_ != nullptr) {
      const uint64_t seen = seen_in_tree(keys);
#pragma unroll
      for (uint32_t i = 0; i < T::kKeyTiles * 4; ++i)
        if ((seen >> i & 1) == 0) s[i / 4][i % 4] = minus_infinity();
    }
    const auto* const numbers =
        reinterpret_cast<const int2*>(keys + kLayout.numbers) + threadIdx.x % 4;
    const auto* const scales =
        reinterpret_cast<const float2*>(keys + kLayout.v_scales) + threadIdx.x % 4;
    const RowLimits of[2] = {limits(0), limits(1)};
    const uint32_t count[2] = {
        of[0].end > of[0].begin ? static_cast<uint32_t>(of[0].end - of[0].begin) : 0,
        of[1].end > of[1].begin ? static_cast<uint32_t>(of[1].end - of[1].begin) : 0};
#pragma unroll
    for (uint32_t t = 0; t < T::kKeyTiles; ++t) {
      const int2 number = numbers[t * 4];
      float2 scale = make_float2(0, 0);
      if constexpr (T::kLevelsV) scale = scales[t * 4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        // Slots without a key have the number -1.
        const auto from =
            static_cast<uint32_t>((i % 2 == 0 ? number.x : number.y) - of[i / 2].begin);
        const bool hidden = from >= count[i / 2];
        if (hidden) s[t][i] = minus_infinity();
        const float scale_of = i % 2 == 0 ? scale.x : scale.y;
        if (T::kLevelsV && !hidden && s[t][i] != minus_infinity() && is_finite(scale_of))
          top[i / 2] = fmaxf(top[i / 2], scale_of);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) top[i] = warp_max<4>(top[i]);
  }

  // Values that the producers left out, to the rows that see their keys: whatever the weight, they
  // are infinite or NaN.
  void add_not_finite(uint32_t stage) {
    using Copies = RowCopies<T::kVDim>;
#pragma unroll 1
    for (uint32_t warp = 0; warp < kProducers / kWarp; ++warp) {
#pragma unroll 1
      for (uint32_t bad =
               reinterpret_cast<const uint32_t*>(key_info<T>(stage) + kLayout.tops)[warp];
           bad != 0; bad &= bad - 1) {
        const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int32_t>(bad))) - 1;
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
  void to_operand(const float (&s)[T::kKeyTiles][4], uint32_t (&p)[T::kKeys / 16][4]) const {
    const bool rows = has_rows();
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
  RowSums rows_[2];
  float o_[T::kVTiles][4] = {};
};

}  // namespace gyre::cuda
