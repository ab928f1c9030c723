#pragma once
// Weights of V over levels as 16-bit integers in fixed point: their scale, and when it follows a
// reference that rises.
#include "cuda/kernels/attention/common/float_bits.cuh"

namespace gyre::cuda {

// How far a logit, in base 2, may be above the reference before that rises. The reference begins
// with the lowest finite float: -inf less -inf would be NaN.
constexpr float kFarAbove = 8;

// The scale of a row's weights in one scale block of V: multiples of 1 / scale, a power of two. One
// that met an infinite weight has scale 0: from then on only infinite weights count, once each. One
// that met NaN has scale NaN, and so will its values.
struct FixedPoint {
  float scale;
  // The lane's weights, of integers as the bits of floats: see LaneWeights::surplus.
  uint32_t weight_sum;

  static FixedPoint none() { return {0x1p126f, 0}; }
};
// The reference lies that far above the largest logit, so that a probability times a scale, of up
// to 2^128, does not overflow.
constexpr float kReferenceHeadroom = 10;

constexpr uint32_t kIntegers =
    0x4B000000u;  // 2^23 as a float: an integer added to it is its last bits

constexpr uint32_t kTooLarge = kIntegers + 0x10000u;
inline uint32_t to_integer(float x) { return __float_as_uint(__fadd_rz(x, 8388608.0f)); }

// The new fixed-point scale of a row whose largest weight is `max_weight`, when the reference rose
// by `shift` bits or a weight does not fit into 16 bits. Returns how far sums must be shifted.
inline uint32_t rescale_weights(FixedPoint& row, float max_weight, uint32_t shift) {
  constexpr int32_t kGrowth = 3;  // bits that weights may grow before the scale must follow
  if (max_weight == -minus_infinity() && !is_nan(row.scale)) {
    if (row.scale != 0) shift = 512;
    row.scale = 0;
  } else if (row.scale > 0 && (shift != 0 || max_weight * row.scale >= 65535.0f)) {
    // When the reference rises, weights shrink: the scale may rise by as much without a shift.
    const int32_t now = exponent_of(row.scale), by = static_cast<int32_t>(shift);
    const int32_t fits = max_weight == 0 ? 126 : 15 - kGrowth - exponent_of(max_weight);
    int32_t up = now + by < fits ? now + by : fits;
    if (up > 126) up = 126;
    if (up < now && max_weight * row.scale < 65535.0f) up = now;
    shift = static_cast<uint32_t>(by + now - up);
    row.scale = power_of_two(up);
  }
  return shift;
}

// 1 / x of a power of two, of 0 or of NaN.
inline float inverse_scale(float x) {
  constexpr uint32_t kTwice = 0x7F000000u;  // the exponents of x and 1 / x add up to this
  return x >= 0x1p-126f ? __uint_as_float(kTwice - __float_as_uint(x)) : 1.0f / x;
}

}  // namespace gyre::cuda
