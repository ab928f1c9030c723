// Scores and weighted sums over rows of f32, f16 or bf16, in f32: what every target can do.

#if defined(GYRE_CPU_ATTENTION_DENSE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_DENSE_INL_H
#undef GYRE_CPU_ATTENTION_DENSE_INL_H
#else
#define GYRE_CPU_ATTENTION_DENSE_INL_H
#endif

#include <algorithm>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/softmax-inl.h"
#include "cpu/kernels/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Dot products of up to four keys with kRows queries; a key that is not there is replaced, not
// read.
template <class T, uint32_t kRows>
HWY_INLINE void ScoreRows(const ScoreJob& job, uint32_t row, uint32_t key, uint32_t keys) {
  const DF d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  const T* k[4];
  for (uint32_t i = 0; i < 4; ++i)
    k[i] = reinterpret_cast<const T*>(job.keys + (key + (i < keys ? i : 0)) * job.key_stride);
  VF acc[kRows][4];
  for (auto& of_row : acc) {
    for (auto& a : of_row) a = hn::Zero(d);
  }
  for (uint32_t c = 0; c < job.head_dim; c += lanes) {
    const VF v[4] = {LoadF32(d, k[0] + c), LoadF32(d, k[1] + c), LoadF32(d, k[2] + c),
                     LoadF32(d, k[3] + c)};
    for (uint32_t r = 0; r < kRows; ++r) {
      const auto query = hn::LoadU(d, job.q_f32 + size_t{row + r} * job.head_dim + c);
      for (uint32_t i = 0; i < 4; ++i) acc[r][i] = hn::MulAdd(query, v[i], acc[r][i]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t i = 0; i < keys; ++i) {
      job.scores[(row + r) * kBlockKeys + key + i] = hn::GetLane(hn::SumOfLanes(d, acc[r][i]));
    }
  }
}

template <class T>
void ScoreDense(const ScoreJob& job) {
  for (uint32_t key = 0; key < job.key_count; key += 4) {
    const uint32_t keys = std::min(job.key_count - key, 4u);
    uint32_t row = 0;
    for (; row + 4 <= job.rows; row += 4) ScoreRows<T, 4>(job, row, key, keys);
    for (; row < job.rows; ++row) ScoreRows<T, 1>(job, row, key, keys);
  }
}

// kRows rows of the accumulator, kVectors vectors of coordinates from c on.
template <class T, uint32_t kRows, uint32_t kVectors>
HWY_INLINE void AccumulateChunk(const AccumulateJob& job, uint32_t row, uint32_t c) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF acc[kRows][kVectors];
  for (auto& of_row : acc) {
    for (auto& a : of_row) a = hn::Zero(d);
  }
  for (uint32_t key = job.begin; key < job.end; ++key) {
    const T* const v = reinterpret_cast<const T*>(job.values + key * job.value_stride) + c;
    for (uint32_t i = 0; i < kVectors; ++i) {
      const auto value = LoadF32(d, v + i * lanes);
      for (uint32_t r = 0; r < kRows; ++r) {
        acc[r][i] = hn::MulAdd(hn::Set(d, job.p[(row + r) * kBlockKeys + key]), value, acc[r][i]);
      }
    }
  }
  // The block is summed up before it is added: single keys would vanish beside a large sum.
  float* const place = job.acc + size_t{row} * job.head_dim + c;
  for (uint32_t r = 0; r < kRows; ++r) {
    const auto rescale = hn::Set(d, job.rescale[row + r]);
    for (uint32_t i = 0; i < kVectors; ++i) {
      float* const at = place + size_t{r} * job.head_dim + i * lanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, at), rescale, acc[r][i]), d, at);
    }
  }
}

template <class T, uint32_t kRows>
void AccumulateRows(const AccumulateJob& job, uint32_t row) {
  const auto lanes = static_cast<uint32_t>(hn::Lanes(DF()));
  uint32_t c = 0;
  for (; c + 4 * lanes <= job.head_dim; c += 4 * lanes) AccumulateChunk<T, kRows, 4>(job, row, c);
  for (; c < job.head_dim; c += lanes) AccumulateChunk<T, kRows, 1>(job, row, c);
}

template <class T>
void AccumulateDense(const AccumulateJob& job) {
  uint32_t row = 0;
  for (; row + 4 <= job.rows; row += 4) AccumulateRows<T, 4>(job, row);
  for (; row < job.rows; ++row) AccumulateRows<T, 1>(job, row);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
