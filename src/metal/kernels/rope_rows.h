#pragma once
// Rotating (and normalising) rows: some heads of one token by a simdgroup, a pair of coordinates to
// a lane. The angle is an exact 64-bit fraction of a turn; a lane makes it once for all heads.
#include "abi/angles.h"
#include "abi/rope.h"
#include "metal/kernels/numbers.h"
#include "metal/kernels/rope_work.h"
#include "metal/kernels/row.h"
#include "metal/kernels/turns.h"

namespace gyre {
namespace metal {

using Angle = abi::TurnAngle;

struct ThreadOps {
  float fma(float a, float b, float c) const { return ::metal::fma(a, b, c); }
  float float_of(uint bits) const { return as_type<float>(bits); }
  uint bits_of(float x) const { return as_type<uint>(x); }
};

// What a rope's angles are made of.
struct RopeTables {
  const device uchar* positions;
  const device uchar* frequencies;  // at any multiple of 4
  const device uchar* factors;
  bool has_factors;
};

inline Angle rope_angle(constant abi::RopeParams& p, const thread RopeTables& tables, ulong token,
                        uint pair) {
  const uint axis = p.mode == 0 ? 0 : abi::rope_axis(p, pair);
  const int value = pointer<int>(
      tables.positions)[token * p.position_token_stride + axis * p.position_axis_stride];
  const ulong position = p.position_signed != 0 ? static_cast<ulong>(static_cast<long>(value))
                                                : static_cast<ulong>(static_cast<uint>(value));
  const bool radians = p.frequency_kind == abi::kRopeRadians;
  const float frequency = radians ? pointer<float>(tables.frequencies)[pair] : 0.0f;
  const float factor = tables.has_factors ? pointer<float>(tables.factors)[pair] : 1.0f;
  ulong turns = 0;
  if (!radians) {
    const device uint* const words = pointer<uint>(tables.frequencies) + 2 * pair;
    turns = words[0] | static_cast<ulong>(words[1]) << 32;
  }
  // A number over infinity is 0; what cannot be computed must not pass for no rotation.
  const bool broken = !is_finite(frequency) || isnan(factor) || factor == 0.0f;
  if (broken || isinf(factor)) {
    turns = 0;
  } else if (radians || tables.has_factors) {
    const Double made = radians ? turns_of_radians(frequency) : turns_of_table(turns);
    turns = fraction_of(tables.has_factors ? divide(made, factor) : made);
  }
  const ThreadOps ops = {};
  const Angle angle = abi::angle_of_turn(static_cast<uint>(position * turns >> 32), ops);
  const float nan = as_type<float>(0x7FC00000u);
  return {broken ? nan : angle.cosine * p.magnitude, broken ? nan : angle.sine * p.magnitude};
}

// Heads of a token, a step apart.
struct RopeHeads {
  const device uchar* x;
  ulong x_step;
  uint rows;
  uint dtype;
  const device uchar* weight;
  uint weight_dtype;  // kRopeNoDtype: all are 1
};

inline float rope_weight(constant abi::RopeParams& p, const thread RopeHeads& heads,
                         uint coordinate) {
  if (heads.weight_dtype == abi::kRopeNoDtype) return 1.0f;
  return load_float(heads.weight, heads.weight_dtype, coordinate) + p.weight_offset;
}

// 1 / sqrt(mean(x^2) + epsilon) where squares leave f32, or are lost: all is divided by a power of
// two first, that of the largest coordinate or of the root of epsilon.
inline float wide_scale(const thread TensorRow& row, uint count, float epsilon, uint lane) {
  uint largest = 0;
  for (uint i = lane; i < count; i += kLanes)
    largest = max(largest, as_type<uint>(row.get(i)) & 0x7FFFFFFFu);
  largest = largest_of_lanes(largest, kPart);
  if (largest > 0x7F800000u) return as_type<float>(0x7FC00000u);
  if (largest == 0x7F800000u) return 0.0f;
  if (largest == 0) return 1.0f / precise::sqrt(epsilon);
  int power = exponent_of(as_type<float>(largest));
  if (epsilon > 0.0f) power = max(power, exponent_of(epsilon) / 2);
  float sum = 0;
  for (uint i = lane; i < count; i += kLanes) {
    const float x = times_power(row.get(i), -power);
    sum = fma(x, x, sum);
  }
  const float mean = sum_of_simdgroup(sum) / static_cast<float>(count);
  const float scaled_epsilon = times_power(times_power(epsilon, -power), -power);
  return times_power(1.0f / precise::sqrt(mean + scaled_epsilon), -power);
}

inline float rope_scale(const thread TensorRow& row, uint count, float epsilon, uint lane) {
  float sum = 0;
  for (uint i = lane; i < count; i += kLanes) {
    const float x = row.get(i);
    sum = fma(x, x, sum);
  }
  sum = sum_of_simdgroup(sum);
  if (!(sum >= 0x1p-100f && sum <= 0x1p127f)) return wide_scale(row, count, epsilon, lane);
  return 1.0f / precise::sqrt(sum / static_cast<float>(count) + epsilon);
}

// Out: where results go. put(row, coordinate, value), and pass(row, coordinate, from) for what is
// neither rotated nor normalised.
template <class Out>
void rotate_pair(constant abi::RopeParams& p, const thread RopeHeads& heads, bool norm,
                 const thread float* scale, const thread Angle& angle, uint u, uint v,
                 const thread Out& out) {
  Angle at_u = angle, at_v = angle;
  if (norm) {
    const float weight_u = rope_weight(p, heads, u), weight_v = rope_weight(p, heads, v);
    at_u = {angle.cosine * weight_u, angle.sine * weight_u};
    at_v = {angle.cosine * weight_v, angle.sine * weight_v};
  }
  for (uint r = 0; r < kRopeRows; ++r) {
    if (r >= heads.rows) break;
    const TensorRow row = {heads.x + r * heads.x_step, heads.dtype};
    float a = row.get(u), b = row.get(v);
    if (norm) a = a * scale[r], b = b * scale[r];
    out.put(r, u, fma(-b, at_v.sine, a * at_u.cosine));
    out.put(r, v, fma(a, at_u.sine, b * at_v.cosine));
  }
}

// Coordinates [begin, end) that are not rotated.
template <class Out>
void pass_coordinates(constant abi::RopeParams& p, const thread RopeHeads& heads, bool norm,
                      const thread float* scale, uint begin, uint end, const thread Out& out,
                      uint lane) {
  for (uint i = begin + lane; i < end; i += kLanes) {
    const float weight = norm ? rope_weight(p, heads, i) : 1.0f;
    for (uint r = 0; r < kRopeRows; ++r) {
      if (r >= heads.rows) break;
      const TensorRow row = {heads.x + r * heads.x_step, heads.dtype};
      if (norm) {
        out.put(r, i, row.get(i) * scale[r] * weight);
      } else {
        out.pass(r, i, row);
      }
    }
  }
}

template <class Out>
void rotate_heads(constant abi::RopeParams& p, const thread RopeTables& tables, ulong token,
                  const thread RopeHeads& heads, bool adjacent, bool norm, const thread Out& out,
                  uint lane) {
  const uint dim = static_cast<uint>(p.head_dim), pairs = static_cast<uint>(p.block_pairs);
  const uint distance = static_cast<uint>(p.distance);
  float scale[kRopeRows];
  for (uint r = 0; r < kRopeRows; ++r) {
    if (!norm || r >= heads.rows) break;
    const TensorRow row = {heads.x + r * heads.x_step, heads.dtype};
    scale[r] = rope_scale(row, dim, p.epsilon, lane);
  }
  for (uint pair = lane; pair < static_cast<uint>(p.blocks) * pairs; pair += kLanes) {
    const uint block = p.blocks == 1 ? 0 : pair / pairs, nth = pair - block * pairs;
    const uint u = adjacent ? 2 * nth : block * static_cast<uint>(p.block_stride) + nth;
    const Angle angle = rope_angle(p, tables, token, pair);
    rotate_pair(p, heads, norm, scale, angle, u, adjacent ? u + 1 : u + distance, out);
  }
  if (adjacent) {
    pass_coordinates(p, heads, norm, scale, 2 * pairs, dim, out, lane);
  } else if (p.blocks == 1) {
    pass_coordinates(p, heads, norm, scale, pairs, distance, out, lane);
    pass_coordinates(p, heads, norm, scale, distance + pairs, dim, out, lane);
  }
}

// Rows of tensors: out, and with the norm a second one of another dtype.
struct RopeOut {
  device uchar* out;
  ulong out_step;
  uint dtype;
  device uchar* second;
  ulong second_step;
  uint second_dtype;  // kRopeNoDtype: there is none

  void put(uint row, uint coordinate, float value) const {
    store_float(out + row * out_step, dtype, coordinate, value);
    if (second_dtype != abi::kRopeNoDtype)
      store_float(second + row * second_step, second_dtype, coordinate, value);
  }
  void pass(uint row, uint coordinate, const thread TensorRow& from) const {
    copy_float(from, coordinate, out + row * out_step, dtype);
  }
};

// The simdgroup's heads of a stream: item `item` of a token.
struct RopeArgs {
  const device uchar* x;
  device uchar* out;
  const device uchar* weight;
  device uchar* second;
};
inline void rotate_item(constant abi::RopeParams& p, constant abi::RopeStream& s,
                        const thread RopeTables& tables, const thread RopeArgs& args, ulong token,
                        ulong item, uint x_dtype, uint out_dtype, bool adjacent, bool norm,
                        uint lane) {
  const ulong head = item * rope_item_rows(p);
  if (head >= s.heads) return;
  const ulong left = s.heads - head;
  const uint rows = left < rope_item_rows(p) ? static_cast<uint>(left) : rope_item_rows(p);
  const RopeHeads heads = {args.x + token * s.x_token_stride + head * s.x_head_stride,
                           s.x_head_stride,
                           rows,
                           x_dtype,
                           args.weight,
                           s.weight_dtype};
  const RopeOut out = {args.out + token * s.out_token_stride + head * s.out_head_stride,
                       s.out_head_stride,
                       out_dtype,
                       args.second + token * s.second_token_stride + head * s.second_head_stride,
                       s.second_head_stride,
                       norm ? s.second_dtype : abi::kRopeNoDtype};
  rotate_heads(p, tables, token, heads, adjacent, norm, out, lane);
}

}  // namespace metal
}  // namespace gyre
