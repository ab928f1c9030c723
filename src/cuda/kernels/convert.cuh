#pragma once
// f32, f16 and bf16. The bits are those of gyre/dtype.h: nearest, ties to even, one NaN for each
// narrow type; f16 to f32 keeps a NaN's sign and payload and makes it quiet.
#include "abi/types.h"

namespace gyre::cuda {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Half value) {
#if defined(GYRE_CUDA_HOST)
  const uint32_t sign_bit = (value.bits & 0x8000u) << 16, half = value.bits & 0x7FFFu;
  float result = half < 0x400u ? static_cast<float>(half) * 0x1p-24f
                               : __uint_as_float((half << 13) + 0x38000000u);
  if (half == 0x7C00u) result = __uint_as_float(0x7F800000u);
  result = __uint_as_float(__float_as_uint(result) | sign_bit);
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
#endif
  // The instruction writes one NaN for all of them.
  const uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude > 0x7C00u) {
    const uint32_t sign = (value.bits & 0x8000u) << 16;
    result = __uint_as_float(sign | 0x7FC00000u | (magnitude & 0x3FFu) << 13);
  }
  return result;
}

inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline Half from_float<Half>(float value) {
#if defined(GYRE_CUDA_HOST)
  const uint32_t pattern = __float_as_uint(value), magnitude = pattern & 0x7FFFFFFFu;
  uint32_t rounded = 0x7C00u;
  if (magnitude < 0x38800000u) {
    rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u;
  } else if (magnitude < 0x47800000u) {
    rounded = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  const auto bits = static_cast<uint16_t>((pattern >> 16 & 0x8000u) | rounded);
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  const bool nan = (__float_as_uint(value) & 0x7FFFFFFFu) > 0x7F800000u;
  return {nan ? static_cast<uint16_t>(0x7E00) : bits};
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t pattern = __float_as_uint(value);
  const uint32_t rounded = (pattern + 0x7FFFu + (pattern >> 16 & 1u)) >> 16;
  const bool nan = (pattern & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(nan ? 0x7FC0u : rounded)};
}

// Within a type a copy of the bits: no NaN changes.
template <class To, class From>
struct Convert {
  static To value(From from) { return from_float<To>(to_float(from)); }
};

template <class T>
struct Convert<T, T> {
  static T value(T from) { return from; }
};

}  // namespace gyre::cuda
