// Levels of K from its packed rows, in the order the int8 matrix product wants. Included only by
// attention_i8mm.cpp.
#pragma once

#include "cpu/attention_i8mm_levels.h"

namespace gyre::cpu {
namespace {

inline uint8x16_t pair_lower(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline uint8x16_t pair_upper(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// 16 stored bytes of two keys, as two vectors of eight bytes of one and eight of the other: what
// the matrix product wants. Unpacking works on bytes, so it may come after.
struct BytePair {
  uint8x16_t half[2];
  BytePair(const uint8_t* a, const uint8_t* b) {
    const uint8x16_t first = vld1q_u8(a), second = vld1q_u8(b);
    half[0] = pair_lower(first, second);
    half[1] = pair_upper(first, second);
  }
};

// 64 coordinates of two rows of K: at<j, half>() gives the levels of 8 coordinates, 16 j + 8 half
// on, of both. Rows have whole groups of 16 bytes.
template <uint32_t kFormat>
struct KeyPair;

template <>
struct KeyPair<abi::kTq8> {
  struct Tables {};
  const uint8_t *a, *b;
  KeyPair(const uint8_t* first, const uint8_t* second, size_t, size_t unit)
      : a(first + unit * 64), b(second + unit * 64) {}
  template <size_t j>
  void levels(const Tables&, int8x16_t (&v)[2]) const {
    const BytePair pair(a + 16 * j, b + 16 * j);
    v[0] = vreinterpretq_s8_u8(pair.half[0]);
    v[1] = vreinterpretq_s8_u8(pair.half[1]);
  }
};

// The low plane of 4, 5 and 6 bits.
struct NibblePair {
  BytePair raw[2];
  NibblePair(const uint8_t* a, const uint8_t* b, size_t unit)
      : raw{{a + unit * 32, b + unit * 32}, {a + unit * 32 + 16, b + unit * 32 + 16}} {}
  template <size_t j>
  void look_up_both(int8x16_t table, int8x16_t (&v)[2]) const {
    for (size_t half = 0; half < 2; ++half) {
      const uint8x16_t bytes = raw[j / 2].half[half];
      v[half] = look_up(table, j % 2 == 0 ? low_nibbles(bytes) : high_nibbles(bytes));
    }
  }
};

template <>
struct KeyPair<abi::kTq4> {
  using Tables = NibbleTables<abi::kTq4>;
  NibblePair low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t unit) : low(a, b, unit) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
  }
};

// The low plane of 2 and 3 bits.
template <uint32_t kFormat>
struct FieldPair {
  uint8x16_t nibbles[2][2];
  FieldPair(const uint8_t* a, const uint8_t* b, size_t unit) {
    const BytePair raw(a + unit * 16, b + unit * 16);
    for (size_t half = 0; half < 2; ++half) {
      nibbles[0][half] = low_nibbles(raw.half[half]);
      nibbles[1][half] = high_nibbles(raw.half[half]);
    }
  }
  template <size_t j>
  void look_up_both(const FieldTables<kFormat>& t, int8x16_t (&v)[2]) const {
    for (size_t half = 0; half < 2; ++half)
      v[half] = look_up(j % 2 == 0 ? t.even : t.odd, nibbles[j / 2][half]);
  }
};

template <>
struct KeyPair<abi::kTq2> {
  using Tables = FieldTables<abi::kTq2>;
  FieldPair<abi::kTq2> low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t unit) : low(a, b, unit) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t, v);
  }
};

// A one-bit plane: 128 coordinates in 16 bytes, bit j of a byte belongs to coordinates 16 j on.
struct BitPair {
  uint8x16_t half[2];
  BitPair(const uint8_t* a, const uint8_t* b, size_t unit) {
    const BytePair raw(a + unit / 2 * 16, b + unit / 2 * 16);
    for (size_t i = 0; i < 2; ++i)
      half[i] = unit % 2 == 0 ? raw.half[i] : high_nibbles(raw.half[i]);
  }
  template <size_t j>
  uint8x16_t mask(size_t i) const {
    return vtstq_u8(half[i], vdupq_n_u8(1u << j));
  }
};

template <>
struct KeyPair<abi::kTq3> {
  using Tables = FieldTables<abi::kTq3>;
  FieldPair<abi::kTq3> low;
  BitPair signs;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t unit)
      : low(a, b, unit), signs(a + head_dim / 4, b + head_dim / 4, unit) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t, v);
    for (size_t half = 0; half < 2; ++half) v[half] = negate_where(v[half], signs.mask<j>(half));
  }
};

template <>
struct KeyPair<abi::kTq5> {
  using Tables = NibbleTables<abi::kTq5>;
  NibblePair low;
  BitPair high;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t unit)
      : low(a, b, unit), high(a + head_dim / 2, b + head_dim / 2, unit) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
    for (size_t half = 0; half < 2; ++half) {
      const uint8x16_t upper = vandq_u8(high.mask<j>(half), vdupq_n_u8(32));
      v[half] = vaddq_s8(v[half], vreinterpretq_s8_u8(upper));
    }
  }
};

template <>
struct KeyPair<abi::kTq6> {
  using Tables = NibbleTables<abi::kTq6>;
  NibblePair low;
  BytePair high;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t unit)
      : low(a, b, unit), high(a + head_dim / 2 + unit * 16, b + head_dim / 2 + unit * 16) {}
  template <size_t j>
  static uint8x16_t to_place(uint8x16_t bytes) {  // bits 2j and 2j + 1 to 5 and 6
    if constexpr (j == 0) return vshlq_n_u8(bytes, 5);
    if constexpr (j == 1) return vshlq_n_u8(bytes, 3);
    if constexpr (j == 2) return vshlq_n_u8(bytes, 1);
    return vshrq_n_u8(bytes, 1);
  }
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.look_up_both<j>(t.level, v);
    for (size_t half = 0; half < 2; ++half) {
      const uint8x16_t upper = vandq_u8(to_place<j>(high.half[half]), vdupq_n_u8(0x60));
      v[half] = vaddq_s8(v[half], vreinterpretq_s8_u8(upper));
    }
  }
};

}  // namespace
}  // namespace gyre::cpu
