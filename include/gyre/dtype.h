#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "gyre/export.h"

namespace gyre {

enum class DType : uint8_t { f32, f16, bf16, u8, i32, u32, i64 };

constexpr uint32_t kDTypeCount = 7;

constexpr uint64_t size_bytes(DType dtype) {  // 0 for what is not a DType
  constexpr uint32_t kSizes = 0x8441224;      // a hex digit each, the first dtype lowest
  const auto index = static_cast<uint32_t>(dtype);
  return index < kDTypeCount ? kSizes >> (4 * index) & 0xF : 0;
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

GYRE_API std::string_view name(DType dtype);

// IEEE binary16. From float: nearest, ties to even; |x| >= 65520 becomes infinity; subnormals are
// kept; every NaN becomes 0x7E00, so that all devices write the same bits.
struct Half {
  uint16_t bits = 0;

  constexpr Half() = default;
  constexpr explicit Half(float value) : bits(round(value)) {}
  static constexpr Half from_bits(uint16_t bits) {
    Half half;
    half.bits = bits;
    return half;
  }
  constexpr bool operator==(const Half&) const = default;

  // Exact. A NaN keeps its sign and payload and becomes quiet, as the hardware conversions do.
  constexpr explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1Fu;
    const uint32_t mantissa = bits & 0x3FFu;
    if (exponent == 0x1F) {
      const uint32_t quiet = mantissa != 0 ? 0x400000u : 0;
      return std::bit_cast<float>(sign | 0x7F800000u | quiet | (mantissa << 13));
    }
    if (exponent != 0) {
      return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    }
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }

 private:
  static constexpr uint16_t round(float value) {
    const auto pattern = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (pattern >> 16) & 0x8000u;
    const uint32_t magnitude = pattern & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7E00;
    if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {
      // Below 2^-14: adding 0.5 puts the f16 subnormal's unit (2^-24) into the last place of a
      // float.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
    }
    const uint32_t tie_to_even = 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + tie_to_even) >> 13));
  }
};

// The upper half of a binary32. From float: nearest, ties to even; every NaN becomes 0x7FC0.
struct BFloat16 {
  uint16_t bits = 0;

  constexpr BFloat16() = default;
  constexpr explicit BFloat16(float value) : bits(round(value)) {}
  static constexpr BFloat16 from_bits(uint16_t bits) {
    BFloat16 result;
    result.bits = bits;
    return result;
  }
  constexpr bool operator==(const BFloat16&) const = default;
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

 private:
  static constexpr uint16_t round(float value) {
    const auto pattern = std::bit_cast<uint32_t>(value);
    if ((pattern & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<uint16_t>((pattern + 0x7FFFu + ((pattern >> 16) & 1u)) >> 16);
  }
};

// The DType that holds a C++ element type; other types do not compile.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<uint32_t> {
  static constexpr DType value = DType::u32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::i64;
};

}  // namespace gyre
