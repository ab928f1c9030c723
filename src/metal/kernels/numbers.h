#pragma once
// Powers of two, and what lanes of a simdgroup find out together.
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

inline float power_of_two(int exponent) {  // of a normal number
  return as_type<float>(static_cast<uint>(127 + exponent) << 23);
}
// x * 2^exponent, for any exponent of a float. A GPU may take subnormal numbers for 0: what is to
// be made normal is first its mantissa, an integer.
inline float times_power(float x, int exponent) {
  const uint magnitude = as_type<uint>(x) & 0x7FFFFFFFu;
  if (magnitude < 0x800000u && exponent > 0) {
    x = copysign(static_cast<float>(magnitude), x);
    exponent -= 149;
  }
  const int half_of_it = exponent / 2;
  return x * power_of_two(half_of_it) * power_of_two(exponent - half_of_it);
}
// The exponent of a float that is finite and not 0.
inline int exponent_of(float x) {
  const uint bits = as_type<uint>(x) & 0x7FFFFFFFu;
  if (bits >= 0x800000u) return static_cast<int>(bits >> 23) - 127;
  return -118 - static_cast<int>(clz(bits));
}

inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7FFFFFFFu) < 0x7F800000u; }

// The largest, or the sum, of `points` / 4 neighbouring lanes, a power of two, for each of them.
inline uint largest_of_lanes(uint value, uint points) {
  for (uint step = 1; step < kLanes; step *= 2) {
    const uint other = simd_shuffle_xor(value, static_cast<ushort>(step));
    if (4 * step < points) value = max(value, other);
  }
  return value;
}
inline int sum_of_lanes(int value, uint points) {
  for (uint step = 1; step < kLanes; step *= 2) {
    const int other = simd_shuffle_xor(value, static_cast<ushort>(step));
    if (4 * step < points) value += other;
  }
  return value;
}

inline float plus_lanes(float sum, uint step, bool inside) {
  const float pair_sum = sum + simd_shuffle_xor(sum, static_cast<ushort>(step));
  return inside ? pair_sum : sum;
}
// In one order for every lane.
inline float sum_of_simdgroup(float sum) {
  for (uint step = 1; step < kLanes; step *= 2) sum = plus_lanes(sum, step, true);
  return sum;
}

}  // namespace metal
}  // namespace gyre
