#pragma once
// Floats by their bits: what is not a number, and powers of two.
#include "abi/types.h"

namespace gyre::cuda {

constexpr float kLowest = -3.402823466e38f;

inline float minus_infinity() { return __uint_as_float(0xFF800000u); }
inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
inline bool is_nan(float x) { return (__float_as_uint(x) & 0x7FFFFFFFu) > 0x7F800000u; }

// 2^n for n from -126 to 127, and x 2^n for n within twice that.
inline float power_of_two(int32_t n) { return __int_as_float((n + 127) << 23); }
inline float times_power(float x, int32_t n) {
  return x * power_of_two(n >> 1) * power_of_two(n - (n >> 1));
}
// The exponent of a number that is finite and not 0, to within one for subnormal ones.
inline int32_t exponent_of(float x) {
  return static_cast<int32_t>(__float_as_uint(x) >> 23 & 255) - 127;
}

// The dot product of a query's hi parts with a key, plus that of its lo parts. An infinite key
// makes NaN of the latter: it is dropped then.
inline float add_lo(float hi, float lo) { return fabsf(lo) < -minus_infinity() ? hi + lo : hi; }

}  // namespace gyre::cuda
