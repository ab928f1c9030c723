#pragma once
// Decode attention over pages: the groups of a work item that lie in several blocks, folded by the
// last block to come.
#include "cuda/kernels/attention/decode/split_fold.cuh"

namespace gyre::cuda {

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
  constexpr uint32_t kAtOnce = 4;
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
