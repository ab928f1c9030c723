#pragma once
// How the cases of attention over caches and over pages make and check what they have in common.

#include "attention/attention_reference.h"
#include "attention/attention_tolerance.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_case.h"

namespace gyre::test {

// One normal number for each head, times `gain`; also in `values`.
inline Block per_head_block(uint64_t heads, float gain, const std::function<float()>& normal,
                            std::vector<double>& values) {
  std::vector<float> made;
  for (uint64_t h = 0; h < heads; ++h) made.push_back(gain * normal());
  values.assign(made.begin(), made.end());
  return plain_block(DType::f32, made);
}

inline double rms(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// An infinite value must be stored exactly.
inline void expect_attention(Block& block, uint64_t place, double value, double bound) {
  if (std::isinf(value))
    return reference::store_bits(DType::f32, block.after.data(), place, 0xFF800000u);
  expect_near(block, place, value, bound + 1e-30);
}

struct AttentionOutput {
  Block& out;
  reference::KvSide side;
  Block* lse = nullptr;  // not asked for
  uint64_t lse_place = 0;
};

// The output and the log-sum-exp of row `row`, [tokens, heads].
inline void expect_attention_row(const reference::AttentionState& state, uint64_t row,
                                 const AttentionTolerance& bounds, const AttentionOutput& to) {
  std::vector<double> values = state.values;
  for (double& x : values) x = state.sum == 0 ? 0 : x / state.sum;
  const double bound = bounds.of_row * rms(values);
  for (uint64_t e = 0; e < values.size(); ++e)
    expect_attention(to.out, to.side.index(row / to.side.heads, row % to.side.heads, e), values[e],
                     bound);
  if (to.lse == nullptr) return;
  const double lse =
      state.sum == 0 ? -std::numeric_limits<double>::infinity() : state.max + std::log(state.sum);
  expect_attention(*to.lse, to.lse_place, lse, bounds.lse);
}

}  // namespace gyre::test
