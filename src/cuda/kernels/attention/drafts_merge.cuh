#pragma once
// Attention of draft tokens: the states of a unit's groups are folded from the oldest on, in the
// same order and with the same arithmetic whether one block has them all or several, which meet in
// global memory. References are integers, so every rescaling is exact.
#include "cuda/kernels/attention/drafts_state.cuh"
#include "cuda/kernels/attention/many_rows_output.cuh"
#include "cuda/kernels/attention/reduce.cuh"

namespace gyre::cuda {

// Values that go with it are relative to the reference, a logit in base 2.
struct DraftRowState {
  float reference, sum;

  // 2^x of a difference of references, which is not positive, nor above: NaN is.
  static float power(float x) {
    return x < -126.0f ? 0.0f : power_of_two(static_cast<int32_t>(x < 0 ? x : 0.0f));
  }
  // Folds a later state; `keep` and `part`: factors of the values.
  void fold(const DraftRowState& later, float& keep, float& part) {
    const float to = fmaxf(reference, later.reference);
    keep = power(reference - to), part = power(later.reference - to);
    sum = __fmaf_rn(later.sum, part, __fmul_rn(sum, keep));  // NaN stays, whatever the factor
    reference = to;
  }
  SoftmaxState softmax() const {
    return {reference == kLowest ? minus_infinity() : reference, sum};
  }
};

template <class T>
class DraftMerge {
  static constexpr uint32_t kVTiles = T::kVTiles, kVectors = kVTiles / 2;
  static constexpr uint32_t kConsumerBarrier = 1;

 public:
  using Values = float[kVTiles][2];

  explicit DraftMerge(DraftsState& state)
      : state_(state),
        p_(state.call),
        args_(state.args),
        folded_(dynamic_shared() + T::kLayout.warps_at +
                threadIdx.x / kWarp * T::kLayout.warp_bytes + threadIdx.x % kWarp * 16) {}

  // For the warps that have rows.
  void add_group(const DraftRun& run, const RunGroups& of, uint32_t group, bool bad,
                 DraftRowState now, Values& v) {
    if (bad || run.bad != 0) now.sum = __uint_as_float(0x7FC00000u);
    if (of.first != 0) {
      put_scratch(run.of, group, now, v);
      return;
    }
    if (group == 0) {
      row_ = now;
    } else {
      float keep, part;
      row_.fold(now, keep, part);
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i)
        fold_vector(v + 2 * i, *reinterpret_cast<const float4*>(folded_ + i * kWarp * 16), keep,
                    part);
    }
    if (group + 1 != of.end) {
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i)
        *reinterpret_cast<float4*>(folded_ + i * kWarp * 16) = vector(v + 2 * i);
    } else if (of.whole()) {
      write(run.of, v);
    } else {
      put_scratch(run.of, 0, row_, v);
    }
  }

  // A unit that several blocks share: the last one to count its groups folds them all. The first
  // left one state for all of its own. For all consumers together.
  void finish_run(const abi::AttentionRun& run, const RunGroups& of) {
    if (of.whole()) return;
    sync();
    if (threadIdx.x == 0) {
      state_.merge_groups = count_groups(args_.at[abi::arg_partial] + run.area * 4, of);
    }
    sync();
    const uint32_t done = state_.merge_groups;
    if (done != 0 && threadIdx.x / kWarp * 8 < run.rows) merge_scratch(run, done, of.all);
    sync();  // merge_groups may change
  }

 private:
  static void sync() { sync_named_barrier<T::kConsumers / kWarp>(kConsumerBarrier); }
  static float4 vector(const float (*v)[2]) {
    return make_float4(v[0][0], v[0][1], v[1][0], v[1][1]);
  }
  static float fold(float before, float later, float keep, float part) {
    return fma_weighted(later, part, fma_weighted(before, keep, 0.0f));
  }
  static void fold_vector(float (*v)[2], const float4& x, float keep, float part) {
    v[0][0] = fold(x.x, v[0][0], keep, part), v[0][1] = fold(x.y, v[0][1], keep, part);
    v[1][0] = fold(x.z, v[1][0], keep, part), v[1][1] = fold(x.w, v[1][1], keep, part);
  }

  // A unit's states: values [group][vector][thread], then {reference, sum} [group][row].
  uint64_t area(const abi::AttentionRun& run) const {
    constexpr uint64_t kBytes = 4 * draft_area_floats(T::kVDim, T::kLayout.rows());
    return args_.at[abi::arg_partial] + paged_counter_bytes(gridDim.x) + run.area * kBytes;
  }
  static uint64_t values_at(uint64_t area, uint32_t group) {
    return area + (uint64_t{group} * kVectors * T::kConsumers + threadIdx.x) * 16;
  }
  static uint64_t state_at(uint64_t area, uint32_t group) {
    constexpr uint64_t kValues = kDraftCut.most_pieces * T::kLayout.rows() * T::kVDim;
    return area + (kValues + (group * T::kLayout.rows() + threadIdx.x / 4) * 2) * 4;
  }
  void put_scratch(const abi::AttentionRun& run, uint32_t group, const DraftRowState& now,
                   const Values& v) const {
    const uint64_t at = area(run);
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i)
      *pointer<float4>(values_at(at, group) + i * T::kConsumers * 16) = vector(v + 2 * i);
    if (threadIdx.x % 4 == 0)
      *pointer<float2>(state_at(at, group)) = make_float2(now.reference, now.sum);
  }
  static void get_scratch(uint64_t area, uint32_t group, DraftRowState& now,
                          float4 (&x)[kVectors]) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i)
      x[i] = load_l2<float4>(values_at(area, group) + i * T::kConsumers * 16);
    const float2 of = load_l2<float2>(state_at(area, group));
    now = {of.x, of.y};
  }
  void merge_scratch(const abi::AttentionRun& run, uint32_t done, uint32_t all) {
    const uint64_t at = area(run);
    float4 x[kVectors];
    Values v;
    get_scratch(at, 0, row_, x);
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      v[2 * i][0] = x[i].x, v[2 * i][1] = x[i].y;
      v[2 * i + 1][0] = x[i].z, v[2 * i + 1][1] = x[i].w;
    }
#pragma unroll 1
    for (uint32_t group = done; group < all; ++group) {
      DraftRowState later;
      get_scratch(at, group, later, x);
      float keep, part;
      row_.fold(later, keep, part);
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) {
        const float of[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
          float& to = v[2 * i + e / 2][e % 2];
          to = fold(to, of[e], keep, part);
        }
      }
    }
    write(run, v);
  }

  // Out of the rotated domain, to global memory.
  void write(const abi::AttentionRun& run, Values& v) const {
    restore_columns<T::kVDim>(v);
    const uint32_t r = threadIdx.x / 4, j = threadIdx.x % 4;
    if (r >= run.rows) return;
    const uint32_t row = run.first_row + r, token = row / p_.group;
    const RowWriter writer(p_, args_,
                           {uint64_t{run.first_token} + token,
                            uint64_t{run.kv_head} * p_.group + row - token * p_.group, 0, false},
                           row_.softmax(), j == 0);
    if (writer.has_pairs()) {
#pragma unroll
      for (uint32_t t = 0; t < kVTiles; ++t) writer.put_pair(t * 8 + 2 * j, v[t][0], v[t][1]);
    } else {
#pragma unroll
      for (uint32_t t = 0; t < kVTiles * 2; ++t)
        writer.put(t / 2 * 8 + 2 * j + t % 2, v[t / 2][t % 2]);
    }
  }

  DraftsState& state_;
  const abi::AttentionParams& p_;
  const Args& args_;
  unsigned char* folded_;  // the thread's values of the groups so far
  DraftRowState row_ = {};
};

}  // namespace gyre::cuda
