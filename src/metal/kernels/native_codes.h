#pragma once
// From a row to codes and scales of the native formats, by a simdgroup. The steps and their order
// are docs/kv_formats.md's.
#include "metal/kernels/numbers.h"
#include "metal/kernels/row.h"

namespace gyre {
namespace metal {

// Codes of a lane's coordinates, a byte each, and the bits of the scale that they are under.
struct RowCodes {
  uint codes[kRowParts];
  uint scale[kRowParts];
};

inline uint magnitude_count(uint format) { return 1u << (abi::kv_codec(format).bits - 1); }
inline float magnitude_threshold(uint format, uint i) {
  return static_cast<float>(abi::kv_magnitude(format, i) + abi::kv_magnitude(format, i + 1));
}

struct Calibrated {
  uint code;
  int level;
};

// y * factor to a code. No lists are searched: a magnitude is a sum of steps.
inline Calibrated code_of(uint format, float y, float factor) {
  const abi::KvCodec codec = abi::kv_codec(format);
  const float v = y * factor;
  const int upper = 1 << (codec.bits - 1);
  Calibrated calibrated;
  if (codec.levels == abi::KvLevels::magnitudes) {
    calibrated.code = 0;
    calibrated.level = abi::kv_magnitude(format, 0);
    for (uint i = 0; i + 1 < magnitude_count(format); ++i) {
      if (!(fabs(v) > magnitude_threshold(format, i))) continue;
      ++calibrated.code;
      calibrated.level += abi::kv_magnitude(format, i + 1) - abi::kv_magnitude(format, i);
    }
    calibrated.code |= as_type<uint>(y) >> 31 << (codec.bits - 1);
  } else if (codec.levels == abi::KvLevels::odd) {
    const int whole = clamp(static_cast<int>(ceil(v)), 1 - upper, upper);
    calibrated.code = static_cast<uint>(whole + upper - 1);
    calibrated.level = 2 * whole - 1;
  } else {
    const int whole = clamp(static_cast<int>(ceil(v - 0.5f)), -127, 127);
    calibrated.code = static_cast<uint>(whole) & 0xFFu;
    calibrated.level = whole;
  }
  return calibrated;
}

// 16 bits, nearest, ties to even. scaled: the scale times 2^31.
inline uint scale_bits(float scaled) {
  const uint bits = min(as_type<uint>(scaled), 0x7F800000u);
  return (bits + 0x3FFFu + (bits >> 15 & 1u)) >> 15;
}

// Whether parts j and j + apart are in one block of at most `limit` points.
inline bool are_joined(uint j, uint apart, uint limit, uint head_dim) {
  return (j & apart) == 0 && min(block_points(kPart * j, head_dim), limit) > kPart * apart;
}

// The largest magnitude of each lane's block, as bits; infinity and NaN are larger than any.
inline void largest_of_blocks(const thread Row& row, uint head_dim, uint limit, uint lane,
                              thread uint* largest) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    uint own = 0;
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) own = max(own, as_type<uint>(row.y[j][k]) & 0x7FFFFFFFu);
    largest[j] = largest_of_lanes(own, block_points(lane_coordinate(j, lane), head_dim));
  }
  GYRE_UNROLL
  for (uint stage = 0; stage < kPartStages; ++stage) {
    const uint apart = 1u << stage;
    GYRE_UNROLL
    for (uint j = 0; j < kRowParts; ++j) {
      if (!are_joined(j, apart, limit, head_dim)) continue;
      largest[j] = largest[j + apart] = max(largest[j], largest[j + apart]);
    }
  }
}

// Step 5 of the format, for a part whose scale blocks have up to 128 coordinates. A group of 16
// coordinates is four lanes, so a quarter of 128 is two groups, one of 64 is one.
inline float sum_of_small_blocks(float own, uint points) {
  float sum = plus_lanes(own, 4, points == 128);
  sum = plus_lanes(sum, 16, points == 128);
  sum = plus_lanes(sum, 8, points >= 64);
  sum = plus_lanes(sum, 4, points == 32 || points == 64);
  sum = plus_lanes(sum, 2, points >= 16);
  return plus_lanes(sum, 1, true);
}
// The groups of a quarter of 256, half of the part's lanes, in order.
inline float sum_of_quarter(float own, uint lane) {
  const uint first = (lane & 16u) | (lane & 3u);
  float sum = simd_shuffle(own, static_cast<ushort>(first));
  for (uint i = 1; i < 4; ++i) sum = sum + simd_shuffle(own, static_cast<ushort>(first + 4 * i));
  return sum;
}

// Sum of squares of each lane's scale block.
inline void sum_squares(const thread Row& row, uint head_dim, uint lane, thread float* sums) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    const thread float* const y = row.y[j];
    const float own = (y[0] * y[0] + y[2] * y[2]) + (y[1] * y[1] + y[3] * y[3]);
    if (block_points(kPart * j, head_dim) > kPart) {
      sums[j] = sum_of_quarter(own, lane);
    } else {
      sums[j] = sum_of_small_blocks(own, block_points(lane_coordinate(j, lane), head_dim));
    }
  }
  GYRE_UNROLL
  for (uint j = 0; j + 1 < kRowParts; j += 2) {
    if (!are_joined(j, 1, abi::kKvScaleBlock, head_dim)) continue;
    float sum = sums[j] + sums[j + 1];
    sum = plus_lanes(sum, 16, true);
    sum = plus_lanes(sum, 2, true);
    sums[j] = sums[j + 1] = plus_lanes(sum, 1, true);
  }
}

// Whether the squares of a transform block left the range in which they are exact enough.
inline bool is_extreme(const thread float* sums, uint head_dim, uint lane) {
  bool found = false;
  float sum = 0;
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint points = block_points(lane_coordinate(j, lane), head_dim);
    if (points == 0) continue;
    // Every second part of a larger block: two have one scale.
    if (points > kPart && j % 2 != 0) continue;
    sum = sum + sums[j];
    const uint parts = points / kPart;
    if (parts > 2 && (j + 2) % parts != 0) continue;
    found = found || !(sum >= 0x1p-80f && sum <= 0x1p120f);
    sum = 0;
  }
  return simd_any(found);
}

// What a transform block is multiplied with to be in range, and whether it has codes at all.
struct BlockStates {
  int exponent[kRowParts];
  uint zero[kRowParts];    // 1: the scale is 0
  uint broken[kRowParts];  // 1: the scale is NaN
};

// States of rows whose squares are in range.
inline void plain_states(thread BlockStates& states) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j)
    states.exponent[j] = 0, states.zero[j] = states.broken[j] = 0;
}
// States of other rows, whose coordinates with signs applied are in `row`: brings them into range.
inline void find_states(thread Row& row, uint head_dim, uint lane, thread BlockStates& states) {
  uint largest[kRowParts];
  largest_of_blocks(row, head_dim, abi::kKvMaxHeadDim, lane, largest);
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    const float magnitude = as_type<float>(largest[j]);
    states.zero[j] = largest[j] == 0 ? 1 : 0;
    states.broken[j] = is_finite(magnitude) ? 0 : 1;
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) row.y[j][k] = states.broken[j] != 0 ? 0.0f : row.y[j][k];
    const bool in_range = magnitude >= 0x1p-30f && magnitude <= 0x1p30f;
    if (in_range || states.zero[j] + states.broken[j] != 0) continue;
    states.exponent[j] = exponent_of(magnitude);
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) row.y[j][k] = times_power(row.y[j][k], -states.exponent[j]);
  }
}

// Codes of a lane's coordinates in a part; returns the sum of their squared levels.
inline int code_lane(const thread float* y, uint format, float factor, thread uint& codes) {
  int squares = 0;
  codes = 0;
  GYRE_UNROLL
  for (uint k = 0; k < 4; ++k) {
    const Calibrated calibrated = code_of(format, y[k], factor);
    codes |= calibrated.code << (8 * k);
    squares += calibrated.level * calibrated.level;
  }
  return squares;
}

// Codes and scales of transformed coordinates.
inline void code_row(const thread Row& row, uint format, float stretch, uint head_dim, uint lane,
                     const thread float* sums, const thread BlockStates& states,
                     thread RowCodes& out) {
  const abi::KvCodec codec = abi::kv_codec(format);
  const bool magnitudes = codec.levels == abi::KvLevels::magnitudes;
  uint largest[kRowParts];
  if (!magnitudes) largest_of_blocks(row, head_dim, abi::kKvScaleBlock, lane, largest);
  int squares[kRowParts];
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    const uint points = block_points(lane_coordinate(j, lane), head_dim);
    const float inverse_size = 1.0f / static_cast<float>(min(points, abi::kKvScaleBlock));
    const float size =
        magnitudes ? precise::sqrt(sums[j] * inverse_size) : as_type<float>(largest[j]);
    const float factor = sums[j] == 0.0f ? 0.0f : codec.gain / size;  // no 0 times infinity
    squares[j] = code_lane(row.y[j], format, factor, out.codes[j]);
    squares[j] = sum_of_lanes(squares[j], points);
  }
  GYRE_UNROLL
  for (uint j = 0; j + 1 < kRowParts; j += 2) {
    if (!are_joined(j, 1, abi::kKvScaleBlock, head_dim)) continue;
    squares[j] = squares[j + 1] = squares[j] + squares[j + 1];
  }
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    const uint points = block_points(lane_coordinate(j, lane), head_dim);
    const float energy = sums[j] * (1.0f / static_cast<float>(points));
    const float scale = precise::sqrt(energy / static_cast<float>(squares[j])) * stretch;
    out.scale[j] = scale_bits(times_power(scale * 0x1p31f, states.exponent[j]));
    const bool is_zero = sums[j] == 0.0f || states.zero[j] != 0;
    if (!is_zero && states.broken[j] == 0) continue;
    out.codes[j] = abi::kv_zero_code(format) * 0x01010101u;
    out.scale[j] = states.broken[j] != 0 ? uint(abi::kKvScaleNaN) : 0u;
  }
}

// rows: see load_row. stretch: 1, or what V's scales are multiplied by.
template <class Rows>
void encode_row(const thread Rows& rows, uint format, float stretch, uint head_dim, uint lane,
                thread RowCodes& out) {
  Row row;
  BlockStates states;
  float sums[kRowParts];
  load_row(rows, head_dim, lane, row);
  flip_signs(row, kSignsNative, head_dim, lane);
  transform(row, head_dim, lane);
  sum_squares(row, head_dim, lane, sums);
  plain_states(states);
  if (is_extreme(sums, head_dim, lane)) {
    load_row(rows, head_dim, lane, row);
    flip_signs(row, kSignsNative, head_dim, lane);
    find_states(row, head_dim, lane, states);
    transform(row, head_dim, lane);
    sum_squares(row, head_dim, lane, sums);
  }
  code_row(row, format, stretch, head_dim, lane, sums, states, out);
}

// Number of the scale block that begins at a coordinate with a lane, or kNoScale.
constant constexpr uint kNoScale = ~0u;
inline uint scale_number(uint coordinate, uint head_dim) {
  const uint points = min(block_points(coordinate, head_dim), abi::kKvScaleBlock);
  if (points == 0 || coordinate % points != 0) return kNoScale;
  if (points == abi::kKvScaleBlock) return coordinate / abi::kKvScaleBlock;
  return head_dim / abi::kKvScaleBlock +
         popcount(head_dim % abi::kKvScaleBlock & ~(2 * points - 1));
}

}  // namespace metal
}  // namespace gyre
