#pragma once
// Levels, codes and sums of a scale block of calibrated rows (docs/kv_formats.md, "Calibrated
// rows"). Lane l has coordinates l + 32 k here: so the chains of a sum are the lanes.
#include "abi/kv_feedback.h"
#include "metal/kernels/native_codes.h"

namespace gyre {
namespace metal {

constant constexpr uint kCalibratedParts = abi::kKvScaleBlock / kLanes;

// The level nearest to t, in t's unit: twice the magnitude, half the odd integer, the byte.
inline float level_near(uint format, float t) {
  const abi::KvCodec codec = abi::kv_codec(format);
  if (codec.levels == abi::KvLevels::magnitudes) {
    float level = static_cast<float>(2 * abi::kv_magnitude(format, 0));
    for (uint i = 0; i + 1 < magnitude_count(format); ++i) {
      const int rise = abi::kv_magnitude(format, i + 1) - abi::kv_magnitude(format, i);
      if (fabs(t) > magnitude_threshold(format, i)) level = level + static_cast<float>(2 * rise);
    }
    return copysign(level, t);
  }
  if (codec.levels == abi::KvLevels::bytes) return clamp(ceil(t - 0.5f), -127.0f, 127.0f);
  const float upper = static_cast<float>(1u << (codec.bits - 1));
  return clamp(ceil(t), 1.0f - upper, upper) - 0.5f;
}
inline float level_unit(uint format) {
  const abi::KvLevels levels = abi::kv_codec(format).levels;
  return levels == abi::KvLevels::magnitudes ? 2.0f
                                             : (levels == abi::KvLevels::bytes ? 1.0f : 0.5f);
}
// The code of a level of level_near().
inline uint code_of_level(uint format, float level) {
  const abi::KvCodec codec = abi::kv_codec(format);
  if (codec.levels == abi::KvLevels::magnitudes) {
    uint index = 0;
    for (uint i = 1; i < magnitude_count(format); ++i)
      if (fabs(level) >= static_cast<float>(2 * abi::kv_magnitude(format, i))) ++index;
    return index | as_type<uint>(level) >> 31 << (codec.bits - 1);
  }
  if (codec.levels == abi::KvLevels::bytes)
    return static_cast<uint>(static_cast<int>(level)) & 0xFFu;
  return static_cast<uint>(static_cast<int>(level + 0.5f) + (1 << (codec.bits - 1)) - 1);
}

// Coordinates beyond the block are 0.
struct CalibratedPart {
  float at[kCalibratedParts];
};
inline CalibratedPart load_part(const threadgroup float* row, uint n, uint lane) {
  CalibratedPart part;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k)
    part.at[k] = kLanes * k + lane < n ? row[kLanes * k + lane] : 0.0f;
  return part;
}

// The documented sum of products.
inline float sum_products(const thread CalibratedPart& v, const thread CalibratedPart& w, uint n) {
  float chain = 0;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) {
    if (kLanes * k >= n) continue;
    chain = fma(v.at[k], w.at[k], chain);
  }
  for (uint step = kLanes / 2; step != 0; step /= 2) chain = plus_lanes(chain, step, true);
  return chain;
}

// Element i of a row times the first `count` rows of a matrix, behind `sum`.
inline float column_product(const device float* matrix, const threadgroup float* row, uint n,
                            uint count, uint i, float sum) {
  for (uint j = 0; j < count; ++j) sum = fma(matrix[j * n + i], row[j], sum);
  return sum;
}

// Step 6: t of each coordinate, with what the errors of those before it add. factor: null if there
// is none; a row follows `stride` floats behind the one before. a: what the blocks before add.
inline CalibratedPart error_feedback(uint format, const device float* factor, uint stride,
                                     const thread CalibratedPart& v, thread CalibratedPart a,
                                     uint n, uint lane) {
  CalibratedPart t;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) t.at[k] = v.at[k] + a.at[k];
  if (factor == nullptr) return t;
  GYRE_UNROLL
  for (uint k = 0; k < kCalibratedParts; ++k) {
    for (uint owner = 0; owner < kLanes && kLanes * k + owner < n; ++owner) {
      const uint i = kLanes * k + owner;
      const float target = v.at[k] + a.at[k];
      if (lane == owner) t.at[k] = target;
      const float error =
          simd_shuffle(v.at[k] - level_near(format, target), static_cast<ushort>(owner));
      GYRE_UNROLL
      for (uint later = k; later < kCalibratedParts; ++later) {
        const uint j = kLanes * later + lane;
        if (j > i && j < n) a.at[later] = fma(factor[i * stride + j], error, a.at[later]);
      }
    }
  }
  return t;
}

}  // namespace metal
}  // namespace gyre
