#pragma once
// Fractions of a turn where they are not in a table as they are: frequencies in radians, and those
// divided by factors. Other backends compute them as doubles, which Metal does not have. Here the
// same operations are done on integers, each rounded as a double's, so that the bits are the same.
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

// mantissa * 2^exponent; the mantissa has 53 bits, or is 0.
struct Double {
  ulong mantissa;
  int exponent;
  bool negative;
};

inline uint leading_zeros(ulong x) {
  const uint high = static_cast<uint>(x >> 32);
  return high != 0 ? clz(high) : 32 + clz(static_cast<uint>(x));
}

// Nearest, ties to even. `inexact`: something follows the mantissa's last bit; it has at least 62
// bits then.
inline Double round_double(ulong mantissa, bool inexact, int exponent, bool negative) {
  if (mantissa == 0) return {0, 0, negative};
  const uint up = leading_zeros(mantissa);
  mantissa <<= up;
  ulong kept = mantissa >> 11;
  const uint remainder = static_cast<uint>(mantissa) & 0x7FFu;
  if (remainder > 0x400u || (remainder == 0x400u && (inexact || (kept & 1) != 0))) ++kept;
  const bool carries = kept >> 53 != 0;
  return {carries ? kept >> 1 : kept, exponent - static_cast<int>(up) + 11 + (carries ? 1 : 0),
          negative};
}

// A finite float, exactly: a mantissa of 24 bits, or 0.
inline Double double_of(float x) {
  const uint bits = as_type<uint>(x), fraction = bits & 0x7FFFFFu;
  const uint exponent = bits >> 23 & 0xFFu;
  if (exponent != 0)
    return {fraction | 0x800000u, static_cast<int>(exponent) - 150, bits >> 31 != 0};
  if (fraction == 0) return {0, 0, bits >> 31 != 0};
  const uint up = clz(fraction) - 8;
  return {static_cast<ulong>(fraction) << up, -149 - static_cast<int>(up), bits >> 31 != 0};
}

// Radians to turns: times 1 / (2 pi), which is 0x145F306DC9C883 * 2^-55 as a double.
inline Double turns_of_radians(float radians) {
  const Double x = double_of(radians);
  const ulong low = x.mantissa * 0xDC9C883ul, high = x.mantissa * 0x145F306ul;
  // The product is high * 2^28 + low, of 76 or 77 bits.
  const ulong upper = high + (low >> 28), remainder = low & 0xFFFFFFFul;
  return round_double(upper << 14 | remainder >> 14, (remainder & 0x3FFFul) != 0,
                      x.exponent - 55 + 14, x.negative);
}

// A frequency of a table: signed, it may turn backwards.
inline Double turns_of_table(ulong turns) {
  const bool negative = turns >> 63 != 0;
  return round_double(negative ? 0 - turns : turns, false, -64, negative);
}

// By a float that is finite and not 0.
inline Double divide(const thread Double& x, float factor) {
  const Double by = double_of(factor);
  const ulong whole = x.mantissa / by.mantissa, remainder = x.mantissa - whole * by.mantissa;
  const ulong quotient = (remainder << 34) / by.mantissa;
  return round_double(whole << 34 | quotient, (remainder << 34) != quotient * by.mantissa,
                      x.exponent - by.exponent - 34, x.negative != by.negative);
}

// The fraction beyond whole turns, as a 64-bit fraction: x - floor(x), cut.
inline ulong fraction_of(const thread Double& x) {
  // From 2^53 on every double is a whole number; the others cut at 2^62.
  if (x.mantissa == 0 || x.exponent + 52 >= 62) return 0;
  const int up = x.exponent + 64;
  const uint down = up < 0 ? static_cast<uint>(-up) : 0;
  const ulong cut = down < 64 ? x.mantissa >> down : 0;
  const bool inexact = down >= 64 || (down != 0 && cut << down != x.mantissa);
  const ulong fraction = up < 0 ? cut : (up < 64 ? x.mantissa << up : 0);
  if (!x.negative) return fraction;
  // 1 - fraction, which a double rounds to 53 bits.
  const ulong remainder = 0 - fraction - (inexact ? 1 : 0);
  if (remainder >> 63 == 0) return remainder;
  const uint last = static_cast<uint>(remainder) & 0x7FFu;
  ulong kept = remainder >> 11;
  if (last > 0x400u || (last == 0x400u && (inexact || (kept & 1) != 0))) ++kept;
  return kept << 11;  // a whole turn is 0
}

}  // namespace metal
}  // namespace gyre
