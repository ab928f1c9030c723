// The end of a row: the sink joins its softmax, values are divided by the sum and written.

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

// Where a row's output goes; lse 0: not wanted.
struct RowOutput {
  const float* sinks;
  uint64_t head;
  uint64_t out, lse;
};

// Merges a sink, one more logit whose value is 0. Returns the rescale factor of the row's values.
HWY_INLINE float MergeSink(const float* sinks, uint64_t head, SoftmaxState& state) {
  if (sinks == nullptr) return 1.0f;
  constexpr float kMost = std::numeric_limits<float>::max();
  float sink = sinks[head];
  if (std::isfinite(sink)) sink = std::clamp(sink * kLog2E, -kMost, kMost);
  if (sink == kMinusInfinity) return 1.0f;
  return state.merge({sink, 1.0f}).mine;
}

// Divides by the softmax's denominator, the sink included, and writes.
template <class Out>
void StoreRow(SoftmaxState state, float* values, uint64_t head_dim, const RowOutput& to) {
  const float rescale = MergeSink(to.sinks, to.head, state);
  const float factor = state.sum == 0 ? 0.0f : rescale / state.sum;
  for (uint64_t c = 0; c < head_dim; ++c) values[c] *= factor;
  CopyRow(static_cast<const float*>(values), pointer<Out>(to.out), head_dim);
  if (to.lse != 0) *pointer<float>(to.lse) = state.log_sum_exp();
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
