#pragma once
// Attention of many rows: what a consumer thread knows of one of its rows.
#include "cuda/kernels/attention/common/value_pair.cuh"

namespace gyre::cuda {

// One of a thread's two rows.
struct RowSums {
  float factor;          // of its scores
  float max;             // largest score so far, or logit in base 2 where these are softened
  float reference;       // of its weights, in base 2
  float sum;             // of this thread's weights
  float scale_exponent;  // multipliers of V so far are below 2 to this
};

constexpr int32_t to_position(int64_t x) {
  constexpr int64_t kMax = 0x7FFFFFFF;
  return static_cast<int32_t>(x < 0 ? 0 : (x > kMax ? kMax : x));
}

// Multipliers that are smaller lose bits of their weights; all of V is below 2^-112 then.
constexpr float kMinScaleExponent = -100.0f;
inline float scale_exponent_of(float scale) {
  return scale == 0 ? kMinScaleExponent : static_cast<float>(exponent_of(scale) + 1);
}

// Weights may end above their top by 2 to this: f16 ends below 2^16.
constexpr float kWeightLag = 7.0f;

}  // namespace gyre::cuda
