// The end of a row: states of its splits are merged, the sink joins its softmax, values are divided
// by the sum and written.

#if defined(GYRE_CPU_ATTENTION_EPILOGUE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_EPILOGUE_INL_H
#undef GYRE_CPU_ATTENTION_EPILOGUE_INL_H
#else
#define GYRE_CPU_ATTENTION_EPILOGUE_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/softmax-inl.h"
#include "cpu/kernel.h"
#include "cpu/kernels/copy-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// A row's state as memory holds it: its values, then the largest natural logit, then the sum.
constexpr uint64_t StateFloats(uint64_t head_dim) { return head_dim + 2; }

HWY_INLINE void StoreState(const SoftmaxState& state, const float* values, uint64_t head_dim,
                           float* to) {
  std::copy_n(values, head_dim, to);
  to[head_dim] = state.max * kLn2;
  to[head_dim + 1] = state.sum;
}

// A state without keys does not count, whatever it holds.
HWY_INLINE SoftmaxState LoadState(const float* from, uint64_t head_dim) {
  if (from[head_dim + 1] == 0) return {};
  return {from[head_dim] * kLog2E, from[head_dim + 1]};
}

// Merges `count` states, `stride` floats apart, in their order.
HWY_INLINE SoftmaxState MergeStates(const float* first, uint64_t count, uint64_t stride,
                                    uint64_t head_dim, float* values) {
  SoftmaxState state;
  // The final maximum comes first: no merge then rescales the values before it.
  for (uint64_t i = 0; i < count; ++i) state.raise(LoadState(first + i * stride, head_dim).max);
  std::fill_n(values, head_dim, 0.0f);
  for (uint64_t i = 0; i < count; ++i) {
    const float* const partial = first + i * stride;
    const SoftmaxState other = LoadState(partial, head_dim);
    if (other.sum == 0) continue;  // no keys, no values
    const float weight = state.merge(other).other;
    for (uint64_t c = 0; c < head_dim; ++c) values[c] += weight * partial[c];
  }
  return state;
}

// Where a row's output goes; lse 0: not wanted.
struct RowOutput {
  const float* sink_logits;
  uint64_t head;
  uint64_t out, lse;
  DType dtype;  // of out
};

// Merges a sink, one more logit whose value is 0. Returns the rescale factor of the row's values.
HWY_INLINE float MergeSink(const float* sink_logits, uint64_t head, SoftmaxState& state) {
  if (sink_logits == nullptr) return 1.0f;
  constexpr float kMax = std::numeric_limits<float>::max();
  float sink = sink_logits[head];
  if (std::isfinite(sink)) sink = std::clamp(sink * kLog2E, -kMax, kMax);
  if (sink == kMinusInfinity) return 1.0f;
  return state.merge({sink, 1.0f}).own;
}

// Divides by the softmax's denominator, the sink included, and writes.
inline void StoreRow(SoftmaxState state, float* values, uint64_t head_dim, const RowOutput& to) {
  const float rescale = MergeSink(to.sink_logits, to.head, state);
  const float factor = state.sum == 0 ? 0.0f : rescale / state.sum;
  for (uint64_t c = 0; c < head_dim; ++c) values[c] *= factor;
  RowFromF32(values, to.out, to.dtype, head_dim);
  if (to.lse != 0) *pointer<float>(to.lse) = state.log_sum_exp();
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
