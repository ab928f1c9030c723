#pragma once
// Attention of draft tokens: the states of a work item's groups are folded from the oldest on, in
// the same order and with the same arithmetic whether one block has them all or several, which meet
// in global memory. References are integers, so every rescaling is exact.
#include "cuda/kernels/attention/many_rows/drafts_softmax.cuh"
#include "cuda/kernels/attention/many_rows/drafts_state.cuh"
#include "cuda/kernels/attention/many_rows/output.cuh"

namespace gyre::cuda {

template <class T>
class DraftMerge {
  static constexpr uint32_t kVTiles = T::kVTiles, kVectors = kVTiles / 2;
  static constexpr uint32_t kWarps = T::kConsumers / kWarp;
  static constexpr uint32_t kHalvesBarrier = 1;  // the first of two; the producers have 0

 public:
  using Values = float[kVTiles][2];

  explicit DraftMerge(DraftsState& state)
      : state_(state),
        p_(state.call),
        args_(state.args),
        folded_(dynamic_shared() + T::kLayout.warps_at +
                threadIdx.x / kWarp * T::kLayout.warp_bytes + threadIdx.x % kWarp * 16) {}

  // Folds a group's state; behind the run's last group the rows are written, by the block that has
  // the work item's last state. For the warps that have rows, each for its own.
  void add_group(const DraftRun& run, const RunGroups& of, uint32_t group, bool invalid,
                 DraftRowState now, Values& v) {
    if (invalid || run.invalid != 0) now.sum = __uint_as_float(0x7FC00000u);
    const bool last = group + 1 == of.end;
    if (of.first != 0) {
      put_scratch(run.of, group, now, v);
    } else {
      add_older(group, now, v);
      if (!last) put_shared(v);
      if (last && !of.whole()) put_scratch(run.of, 0, row_, v);
    }
    if (last && (of.whole() || merge_blocks(run.of, of, v))) write(run.of, v);
  }

  // The second half of a stage's keys, behind the first: a state of warp w + 2 for one of warp w.
  void put_half(const DraftRowState& now, const Values& v) {
    put_shared(v);
    if (threadIdx.x % 4 == 0) state_.halves[threadIdx.x / 4 % 16] = {now.reference, now.sum};
  }
  void add_half(DraftRowState& now, Values& v) const {
    const float2 of = state_.halves[threadIdx.x / 4];
    float rescale, part;
    now.fold({of.x, of.y}, rescale, part);
    const unsigned char* const from = folded_ + 2 * T::kLayout.warp_bytes;
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i)
      fold_later(v + 2 * i, *reinterpret_cast<const float4*>(from + i * kWarp * 16), rescale, part);
  }
  void sync_halves() const { sync_named_barrier<2>(kHalvesBarrier + threadIdx.x / kWarp % 2); }

 private:
  static float4 vector(const float (*v)[2]) {
    return make_float4(v[0][0], v[0][1], v[1][0], v[1][1]);
  }
  static float fold(float before, float later, float rescale, float part) {
    return fma_weighted(later, part, fma_weighted(before, rescale, 0.0f));
  }
  void put_shared(const Values& v) const {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i)
      *reinterpret_cast<float4*>(folded_ + i * kWarp * 16) = vector(v + 2 * i);
  }
  // The run's groups before this one, which are in shared memory.
  void add_older(uint32_t group, const DraftRowState& now, Values& v) {
    if (group == 0) {
      row_ = now;
      return;
    }
    float rescale, part;
    row_.fold(now, rescale, part);
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(folded_ + i * kWarp * 16);
      float(*const to)[2] = v + 2 * i;
      to[0][0] = fold(x.x, to[0][0], rescale, part), to[0][1] = fold(x.y, to[0][1], rescale, part);
      to[1][0] = fold(x.z, to[1][0], rescale, part), to[1][1] = fold(x.w, to[1][1], rescale, part);
    }
  }

  static void fold_later(float (*v)[2], const float4& x, float rescale, float part) {
    v[0][0] = fold(v[0][0], x.x, rescale, part), v[0][1] = fold(v[0][1], x.y, rescale, part);
    v[1][0] = fold(v[1][0], x.z, rescale, part), v[1][1] = fold(v[1][1], x.w, rescale, part);
  }

  // A work item's states: values [group][vector][thread], then {reference, sum} [group][row].
  uint64_t area(const abi::AttentionRun& run) const {
    constexpr uint64_t kBytes = 4 * draft_area_floats(T::kVDim, T::kLayout.rows());
    return args_.at[abi::arg_partial] + paged_counter_bytes(gridDim.x * kWarps) + run.area * kBytes;
  }
  static uint64_t values_at(uint64_t area, uint32_t group) {
    return area + (uint64_t{group} * kVectors * T::kConsumers + threadIdx.x) * 16;
  }
  static uint64_t state_at(uint64_t area, uint32_t group) {
    constexpr uint64_t kValues = kDraftCut.max_splits * T::kLayout.rows() * T::kVDim;
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
  // A work item that several blocks share: the last one to count its groups folds them all, to `v`.
  // The first left one state for all of its own. False: another block does it.
  bool merge_blocks(const abi::AttentionRun& run, const RunGroups& of, Values& v) {
    const uint32_t all = of.all;
    __syncwarp();
    uint32_t done = 0;
    if (threadIdx.x % kWarp == 0)
      done = count_groups(
          args_.at[abi::arg_partial] + (run.area * kWarps + threadIdx.x / kWarp) * 4, of);
    done = __shfl_sync(kAll, done, 0);
    if (done == 0) return false;
    const uint64_t at = area(run);
    float4 x[kVectors];
    get_scratch(at, 0, row_, x);
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      v[2 * i][0] = x[i].x, v[2 * i][1] = x[i].y;
      v[2 * i + 1][0] = x[i].z, v[2 * i + 1][1] = x[i].w;
    }
    // Several groups' loads at a time: they take a microsecond.
    constexpr uint32_t kAtOnce = T::kVDim > 128 ? 2 : 4;
#pragma unroll 1
    for (uint32_t group = done; group < all; group += kAtOnce) {
      DraftRowState later[kAtOnce];
      float4 y[kAtOnce][kVectors];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        get_scratch(at, group + i < all ? group + i : group, later[i], y[i]);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (group + i >= all) break;
        float rescale, part;
        row_.fold(later[i], rescale, part);
#pragma unroll
        for (uint32_t k = 0; k < kVectors; ++k) fold_later(v + 2 * k, y[i][k], rescale, part);
      }
    }
    return true;
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
