// Levels of V from its tiles, eight tokens of a coordinate side by side. Included only by
// attention_i8mm.cpp.
#pragma once

#include "cpu/attention_i8mm_levels.h"

namespace gyre::cpu {
namespace {

inline int8x16_t zip1_32(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
inline int8x16_t zip2_32(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
inline int8x16_t zip1_16(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s16(vzip1q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}
inline int8x16_t zip2_16(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s16(vzip2q_s16(vreinterpretq_s16_s8(a), vreinterpretq_s16_s8(b)));
}

// Eight coordinates of a tile of V from the low plane: v[i] holds the eight tokens of coordinate
// 2i, then those of 2i + 1.
inline void load_nibbles(int8x16_t level, const uint8_t* plane, int8x16_t (&v)[4]) {
  for (size_t i = 0; i < 2; ++i) {
    const uint8x16_t raw = vld1q_u8(plane + 16 * i);
    const int8x16_t early = look_up(level, low_nibbles(raw));
    const int8x16_t late = look_up(level, high_nibbles(raw));
    v[2 * i] = zip1_32(early, late);
    v[2 * i + 1] = zip2_32(early, late);
  }
}

// Two-bit fields of eight coordinates, through one table per field of a nibble.
inline void load_fields(int8x16_t even, int8x16_t odd, const uint8_t* plane, int8x16_t (&v)[4]) {
  const uint8x16_t raw = vld1q_u8(plane);
  const uint8x16_t low = low_nibbles(raw), high = high_nibbles(raw);
  const int8x16_t t01 = look_up(even, low), t23 = look_up(odd, low);
  const int8x16_t t45 = look_up(even, high), t67 = look_up(odd, high);
  const int8x16_t early1 = zip1_16(t01, t23), early2 = zip2_16(t01, t23);
  const int8x16_t late1 = zip1_16(t45, t67), late2 = zip2_16(t45, t67);
  v[0] = zip1_32(early1, late1), v[1] = zip2_32(early1, late1);
  v[2] = zip1_32(early2, late2), v[3] = zip2_32(early2, late2);
}

// One-bit plane, a byte per coordinate: all ones where the bit is set.
inline uint8x16_t bits_of_pair(uint8x16_t bytes, size_t i) {
  alignas(16) static constexpr uint8_t kRepeat[4][16] = {
      {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
      {2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3},
      {4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5},
      {6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7}};
  alignas(16) static constexpr uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                                   1, 2, 4, 8, 16, 32, 64, 128};
  return vtstq_u8(vqtbl1q_u8(bytes, vld1q_u8(kRepeat[i])), vld1q_u8(kBit));
}

template <uint32_t kFormat>
struct ValueLoader;

template <>
struct ValueLoader<abi::kTq8> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    for (size_t i = 0; i < 4; ++i)
      v[i] = vld1q_s8(reinterpret_cast<const int8_t*>(tile) + c * 8 + 16 * i);
  }
};

template <>
struct ValueLoader<abi::kTq4> : NibbleTables<abi::kTq4> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    load_nibbles(level, tile + c * 4, v);
  }
};

template <>
struct ValueLoader<abi::kTq2> : FieldTables<abi::kTq2> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    load_fields(even, odd, tile + c * 2, v);
  }
};

template <>
struct ValueLoader<abi::kTq3> : FieldTables<abi::kTq3> {
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    load_fields(even, odd, tile + c * 2, v);
    const uint8x8_t signs = vld1_u8(tile + head_dim * 2 + c);
    for (size_t i = 0; i < 4; ++i)
      v[i] = negate_where(v[i], bits_of_pair(vcombine_u8(signs, signs), i));
  }
};

template <>
struct ValueLoader<abi::kTq5> : NibbleTables<abi::kTq5> {
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    load_nibbles(level, tile + c * 4, v);
    const uint8x8_t high = vld1_u8(tile + head_dim * 4 + c);
    for (size_t i = 0; i < 4; ++i) {
      const uint8x16_t upper = vandq_u8(bits_of_pair(vcombine_u8(high, high), i), vdupq_n_u8(32));
      v[i] = vaddq_s8(v[i], vreinterpretq_s8_u8(upper));
    }
  }
};

template <>
struct ValueLoader<abi::kTq6> : NibbleTables<abi::kTq6> {
  int8x16_t even = load_table([](uint32_t i) { return (i & 3) * 32; });
  int8x16_t odd = load_table([](uint32_t i) { return (i >> 2) * 32; });
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    int8x16_t upper[4];
    load_nibbles(level, tile + c * 4, v);
    load_fields(even, odd, tile + head_dim * 4 + c * 2, upper);
    for (size_t i = 0; i < 4; ++i) v[i] = vaddq_s8(v[i], upper[i]);
  }
};

}  // namespace
}  // namespace gyre::cpu
