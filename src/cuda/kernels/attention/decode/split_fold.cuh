#pragma once
// Decode attention over pages: the state of some keys as a warp holds it, and the fold of two such
// states. References are integers, so that every factor is a power of two: a fold rounds nothing
// but sums, and gives the same bits wherever the states come from.
#include "cuda/kernels/attention/decode/paged_layout.cuh"
#include "cuda/kernels/attention/decode/row_target.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// A set of rows over the keys so far, as the MMA over V leaves them. Levels: coordinates 32 v + 4 g
// + e of row j in x[v][e]. 16-bit values: coordinates 16 v + g + 8 (e / 2) of row 2 j + e % 2.
template <class Traits>
struct RowSet {
  static constexpr bool kLevels = Traits::kLevelsV;
  static constexpr uint32_t kSets = fold_sets(Traits::kV, Traits::kRows);
  static constexpr uint32_t kSetRows = kLevels ? 4 : 8, kLaneRows = kLevels ? 1 : 2;
  static constexpr uint32_t kVectors = fold_vectors(Traits::kV, Traits::kValueSlice);
  static constexpr uint32_t kSetBytes = fold_set_bytes(Traits::kV, Traits::kValueSlice);
  static constexpr uint32_t kColumns = kVectors * (kLevels ? 32 : 16);

  float x[kVectors][4];
  float reference[kLaneRows], sum[kLaneRows];

  static uint32_t lane() { return threadIdx.x % kWarp; }

  // The factors of both sides, of row r of the lane.
  struct Factors {
    float rescale, part;
  };
  Factors raise(uint32_t r, float part_reference, float part_sum) {
    const float to = fmaxf(reference[r], part_reference);
    const Factors f = {exp2_fast(reference[r] - to), exp2_fast(part_reference - to)};
    reference[r] = to;
    sum[r] = __fmaf_rn(part_sum, f.part, __fmul_rn(sum[r], f.rescale));
    return f;
  }
  static float fold(float so_far, float rescale, float part, float weight) {
    return fma_weighted(part, weight, fma_weighted(so_far, rescale, 0.0f));
  }

  void add(const RowSet& part) {
    Factors f[kLaneRows];
#pragma unroll
    for (uint32_t r = 0; r < kLaneRows; ++r) f[r] = raise(r, part.reference[r], part.sum[r]);
#pragma unroll
    for (uint32_t i = 0; i < kVectors * 4; ++i) {
      const Factors& of = f[i % kLaneRows];
      x[i / 4][i % 4] = fold(x[i / 4][i % 4], of.rescale, part.x[i / 4][i % 4], of.part);
    }
  }

  // What a warp summed up of a split. `invalid`: a page that does not exist: rows become NaN.
  void set(const LaneWeights& lane_weights, const LevelSums<Traits>& from, uint32_t set,
           bool invalid) {
    constexpr uint32_t kBlocks = Traits::kWarpBlocksV;
    const WarpWeights<Traits> weights(lane_weights, from, set);
    const float scale = common_scale(from, set), weight = inverse_scale(scale);
    typename WarpSums<Traits>::Levels levels[kBlocks];
#pragma unroll
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const float of = from.fixed[block][set].scale;
      levels[block].set(weights.levels[block], of > 0 ? scale * inverse_scale(of) : 1.0f / of);
    }
    reference[0] = from.row[set].reference;
    sum[0] = invalid ? __uint_as_float(0x7FC00000u) : weights.sum;
#pragma unroll
    for (uint32_t i = 0; i < kVectors * 4; ++i) {
      const uint32_t at = i / 2;  // 2 span + e / 2
      const float part = levels[from.block_of(at)].whole(from.sums[set][at] + i % 2 * 2);
      x[i / 4][i % 4] = __fmul_rn(part, weight);
    }
  }
  void set(const LaneWeights&, const Float16Sums<Traits>& from, uint32_t set, bool invalid) {
    const FloatRow& row = from.row[set];
    float all = row.sum + __shfl_xor_sync(kAll, row.sum, 1);
    all += __shfl_xor_sync(kAll, all, 2);
    if (invalid) all = __uint_as_float(0x7FC00000u);
    const float2 references = transpose_rows(row.reference), sums = transpose_rows(all);
    reference[0] = references.x, sum[0] = sums.x;
    reference[kLaneRows - 1] = references.y, sum[kLaneRows - 1] = sums.y;
    const float unit =
        inverse_scale(Traits::kV == kFormatF16 ? power_of_two(kProbabilityUp) : 1.0f);
#pragma unroll
    for (uint32_t i = 0; i < kVectors * 4; ++i)
      x[i / 4][i % 4] = __fmul_rn(from.sums[set][i / 4][i % 4], unit);
  }

  // Behind the older keys of a fold in memory.
  void follow(const unsigned char* place) {
    RowSet all;
    all.get(place);
    all.add(*this);
    *this = all;
  }

  // To and from memory: [vector][lane], then the states of the lanes' rows.
  float4 states() const {
    return make_float4(reference[0], sum[0], reference[kLaneRows - 1], sum[kLaneRows - 1]);
  }
  void set_states(const float4& s) {
    reference[0] = s.x, sum[0] = s.y;
    reference[kLaneRows - 1] = s.z, sum[kLaneRows - 1] = s.w;
  }
  void get(const unsigned char* place) {
    const auto* const from = reinterpret_cast<const float4*>(place) + lane();
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const float4 all = from[v * kWarp];
      x[v][0] = all.x, x[v][1] = all.y, x[v][2] = all.z, x[v][3] = all.w;
    }
    set_states(from[kVectors * kWarp]);
  }
  void put(unsigned char* place) const {
    auto* const to = reinterpret_cast<float4*>(place) + lane();
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v)
      to[v * kWarp] = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
    to[kVectors * kWarp] = states();
  }

  // As rows [row][coordinate] of floats in the same place.
  static constexpr uint32_t kPitch = kColumns + 4;
  static_assert(kSetRows * kPitch * 4 <= kSetBytes);
  void put_rows(unsigned char* place) const {
    auto* const rows = reinterpret_cast<float*>(place);
    const uint32_t g = lane() / 4, j = lane() % 4;
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      if constexpr (kLevels) {
        *reinterpret_cast<float4*>(rows + j * kPitch + 32 * v + 4 * g) =
            make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
      } else {
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e)
          rows[(2 * j + e % 2) * kPitch + 16 * v + g + e / 2 * 8] = x[v][e];
      }
    }
  }
  // The state of row r of the set; a row that saw nothing has no largest logit.
  SoftmaxState row_state(uint32_t r) const {
    const uint32_t i = kLevels ? 0 : r % 2;
    const int source = static_cast<int>(kLevels ? r : r / 2);
    float of = reference[0], all = sum[0];
    if constexpr (!kLevels)
      of = i == 0 ? reference[0] : reference[1], all = i == 0 ? sum[0] : sum[1];
    of = __shfl_sync(kAll, of, source), all = __shfl_sync(kAll, all, source);
    return {all == 0 ? minus_infinity() : of, all};
  }
  void put_states(SoftmaxState* to) const {
#pragma unroll
    for (uint32_t r = 0; r < kSetRows; ++r) {
      const SoftmaxState state = row_state(r);
      if (lane() == r) to[r] = state;
    }
  }
  // A row of the sets of all warps that share keys, from put_rows and put_states: lane i has
  // coordinates i + 32 c. The warps may have references of their own: the first one's count.
  static void read_row(const unsigned char* sets, const SoftmaxState* states, uint32_t row,
                       float (&to)[Traits::kRowDim / kWarp]) {
    constexpr uint32_t kWarps = Traits::kWarpsPerKey;
    const unsigned char* const rows = sets + row / kSetRows * kSetBytes;
#pragma unroll
    for (uint32_t c = 0; c < Traits::kRowDim / kWarp; ++c) {
      const uint32_t column = lane() + c * kWarp, of = column / kColumns;
      to[c] = 0;
      if (c * kWarp < kWarps * kColumns && (kColumns % kWarp == 0 || column < kColumns))
        to[c] = reinterpret_cast<const float*>(
            rows + of * (kSets * kSetBytes))[row % kSetRows * kPitch + column % kColumns];
      if (kWarps > 1 && of != 0 && states[row].sum != 0)
        to[c] *= exp2_fast(states[of * Traits::kRows + row].max - states[row].max);
    }
  }
};

// A set of one vector, with the arithmetic of all.
template <class Set>
struct OneVector {
  Set set_of;

  void set(const float4& x, const float4& states) {
    set_of.x[0][0] = x.x, set_of.x[0][1] = x.y, set_of.x[0][2] = x.z, set_of.x[0][3] = x.w;
    set_of.set_states(states);
  }
  void add(const float4& x, const float4& states) {
    OneVector part;
    part.set(x, states);
    typename Set::Factors f[Set::kLaneRows];
#pragma unroll
    for (uint32_t r = 0; r < Set::kLaneRows; ++r)
      f[r] = set_of.raise(r, part.set_of.reference[r], part.set_of.sum[r]);
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) {
      const auto& of = f[e % Set::kLaneRows];
      set_of.x[0][e] = Set::fold(set_of.x[0][e], of.rescale, part.set_of.x[0][e], of.part);
    }
  }
  float4 vector() const {
    return make_float4(set_of.x[0][0], set_of.x[0][1], set_of.x[0][2], set_of.x[0][3]);
  }
};

// Groups [done, groups) behind the fold of the first `done`, to the work item's fold: a thread has
// one vector of a set at a time.
template <class Traits>
inline void fold_groups(const float4* from, float4* to, uint32_t done, uint32_t groups) {
  using Set = RowSet<Traits>;
  constexpr uint32_t kPerKey = Traits::kWarpsPerKey;
  constexpr uint32_t kFoldBytes = fold_bytes(Traits::kV, Traits::kDims, Traits::kRows);
  constexpr uint32_t kVectors = Set::kVectors * kWarp, kSetVectors = Set::kSetBytes / 16;
  constexpr uint32_t kAtOnce = 8;  // loads take a microsecond
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kPerKey * Set::kSets * kVectors; i += blockDim.x) {
    const uint32_t set = i / kVectors, at = set * kSetVectors + i % kVectors;
    const uint32_t states = set * kSetVectors + kVectors + i % kWarp;
    OneVector<Set> fold;
    fold.set(load_l2(from + at), load_l2(from + states));
#pragma unroll 1
    for (uint32_t group = done; group < groups; group += kAtOnce) {
      float4 x[kAtOnce], s[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const uint64_t of = uint64_t{group + j < groups ? group + j : group} * (kFoldBytes / 16);
        x[j] = load_l2(from + of + at), s[j] = load_l2(from + of + states);
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j)
        if (group + j < groups) fold.add(x[j], s[j]);
    }
    to[at] = fold.vector();
    if (i % kVectors < kWarp) to[states] = fold.set_of.states();
  }
}

}  // namespace gyre::cuda
