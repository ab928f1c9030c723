#pragma once
// NEON's unpacker of V: tiles become levels, eight coordinates of eight tokens at a time.

#include "cpu/attention/isa/unpack_neon.h"

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

// Order of 64 levels in four vectors, for MMA: v[i] holds the eight tokens of coordinate 2i, then
// those of 2i + 1.
struct EightTokens {
  // Takes four coordinates of the first four tokens, and of the last four.
  static void join(int8x16_t early, int8x16_t late, int8x16_t* v) {
    v[0] = zip1_32(early, late);
    v[1] = zip2_32(early, late);
  }
  // Takes four coordinates, each with its eight tokens.
  static void arrange(int8x16_t first, int8x16_t second, int8x16_t* v) {
    v[0] = first;
    v[1] = second;
  }
  // One-bit plane, a byte per coordinate: all ones where the bit of v[i]'s level is set.
  static uint8x16_t bits(uint8x16_t bytes, size_t i) {
    alignas(16) static constexpr uint8_t kRepeat[4][16] = {
        {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
        {2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3},
        {4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5},
        {6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7}};
    alignas(16) static constexpr uint8_t kBit[16] = {1, 2, 4, 8, 16, 32, 64, 128,
                                                     1, 2, 4, 8, 16, 32, 64, 128};
    return vtstq_u8(vqtbl1q_u8(bytes, vld1q_u8(kRepeat[i])), vld1q_u8(kBit));
  }
};

// Order for dot products: v[2i] holds the first four tokens of coordinates 4i to 4i + 3, v[2i + 1]
// the last four. The four sums of a vector then belong to four coordinates, and nearly all planes
// are stored like that.
struct FourTokens {
  static void join(int8x16_t early, int8x16_t late, int8x16_t* v) {
    v[0] = early;
    v[1] = late;
  }
  static void arrange(int8x16_t first, int8x16_t second, int8x16_t* v) {
    const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
    v[0] = vreinterpretq_s8_s32(vuzp1q_s32(a, b));
    v[1] = vreinterpretq_s8_s32(vuzp2q_s32(a, b));
  }
  static uint8x16_t bits(uint8x16_t bytes, size_t i) {
    alignas(16) static constexpr uint8_t kRepeat[2][16] = {
        {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
        {4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7}};
    alignas(16) static constexpr uint8_t kBit[2][16] = {
        {1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8},
        {16, 32, 64, 128, 16, 32, 64, 128, 16, 32, 64, 128, 16, 32, 64, 128}};
    return vtstq_u8(vqtbl1q_u8(bytes, vld1q_u8(kRepeat[i / 2])), vld1q_u8(kBit[i % 2]));
  }
};

// The low plane of 4, 5 and 6 bits.
template <class Order>
inline void load_nibbles(int8x16_t level, const uint8_t* plane, int8x16_t (&v)[4]) {
  for (size_t i = 0; i < 2; ++i) {
    const uint8x16_t raw = vld1q_u8(plane + 16 * i);
    Order::join(look_up(level, low_nibbles(raw)), look_up(level, high_nibbles(raw)), v + 2 * i);
  }
}

// Two-bit fields of eight coordinates, through one table per field of a nibble.
template <class Order>
inline void load_fields(int8x16_t even, int8x16_t odd, const uint8_t* plane, int8x16_t (&v)[4]) {
  const uint8x16_t raw = vld1q_u8(plane);
  const uint8x16_t low = low_nibbles(raw), high = high_nibbles(raw);
  const int8x16_t t01 = look_up(even, low), t23 = look_up(odd, low);
  const int8x16_t t45 = look_up(even, high), t67 = look_up(odd, high);
  Order::join(zip1_16(t01, t23), zip1_16(t45, t67), v);
  Order::join(zip2_16(t01, t23), zip2_16(t45, t67), v + 2);
}

// Specialised by the bits of a format's two planes.
template <class Order, uint32_t kFormat, uint32_t kLow = abi::kv_low_bits(kFormat),
          uint32_t kHigh = abi::kv_high_bits(kFormat)>
struct ValueTile;

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 8, 0> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    const auto* const levels = reinterpret_cast<const int8_t*>(tile) + c * 8;
    Order::arrange(vld1q_s8(levels), vld1q_s8(levels + 16), v);
    Order::arrange(vld1q_s8(levels + 32), vld1q_s8(levels + 48), v + 2);
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 4, 0> : NibbleTables<kFormat> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    load_nibbles<Order>(this->level, tile + c * 4, v);
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 2, 0> : FieldTables<kFormat> {
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    load_fields<Order>(this->even, this->odd, tile + c * 2, v);
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 2, 1> : FieldTables<kFormat> {
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    load_fields<Order>(this->even, this->odd, tile + c * 2, v);
    const uint8x8_t signs = vld1_u8(tile + head_dim * 2 + c);
    for (size_t i = 0; i < 4; ++i)
      v[i] = negate_where(v[i], Order::bits(vcombine_u8(signs, signs), i));
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 4, 1> : NibbleTables<kFormat> {
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    load_nibbles<Order>(this->level, tile + c * 4, v);
    const uint8x8_t high = vld1_u8(tile + head_dim * 4 + c);
    for (size_t i = 0; i < 4; ++i) {
      const uint8x16_t upper = vandq_u8(Order::bits(vcombine_u8(high, high), i), vdupq_n_u8(32));
      v[i] = vaddq_s8(v[i], vreinterpretq_s8_u8(upper));
    }
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 4, 2> : NibbleTables<kFormat> {
  int8x16_t even = load_table([](uint32_t i) { return (i & 3) * 32; });
  int8x16_t odd = load_table([](uint32_t i) { return (i >> 2) * 32; });
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    int8x16_t upper[4];
    load_nibbles<Order>(this->level, tile + c * 4, v);
    load_fields<Order>(even, odd, tile + head_dim * 4 + c * 2, upper);
    for (size_t i = 0; i < 4; ++i) v[i] = vaddq_s8(v[i], upper[i]);
  }
};

}  // namespace
}  // namespace gyre::cpu
