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
};

// Shifts lanes left, each by its own number of bits, right if that is negative.
inline uint8x16_t shift_bytes(uint8x16_t v, uint32_t by_four) {
  return vshlq_u8(v, vreinterpretq_s8_u32(vdupq_n_u32(by_four)));
}
inline uint8x16_t shift_words(uint8x16_t v, uint32_t by_two) {
  return vreinterpretq_u8_u16(
      vshlq_u16(vreinterpretq_u16_u8(v), vreinterpretq_s16_u32(vdupq_n_u32(by_two))));
}

inline uint8x16_t load_eight(const uint8_t* bytes) {
  uint64_t eight = 0;
  __builtin_memcpy(&eight, bytes, 8);
  return vreinterpretq_u8_u64(vdupq_n_u64(eight));
}

// Nibbles of four coordinates below the bits of a high plane, which lie from bit 4 on.
template <class Order>
inline void join_nibbles(uint8x16_t nibbles, uint8x16_t early, uint8x16_t late, uint8_t mask,
                         int8x16_t* v) {
  const uint8x16_t code_bits = vdupq_n_u8(mask);
  Order::join(as_signed(vandq_u8(vbslq_u8(vdupq_n_u8(15), nibbles, early), code_bits)),
              as_signed(vandq_u8(vsriq_n_u8(late, nibbles, 4), code_bits)), v);
}

// Two-bit fields of eight coordinates: look<i>(nibbles) gives tokens 2 i and 2 i + 1, from the
// nibbles that hold them.
template <class Order, class Look>
inline void load_fields(const uint8_t* plane, const Look& look, int8x16_t (&v)[4]) {
  const uint8x16_t raw = vld1q_u8(plane);
  const uint8x16_t low = low_nibbles(raw), high = high_nibbles(raw);
  const int8x16_t t01 = look.template tokens<0>(low), t23 = look.template tokens<1>(low);
  const int8x16_t t45 = look.template tokens<2>(high), t67 = look.template tokens<3>(high);
  Order::join(zip1_16(t01, t23), zip1_16(t45, t67), v);
  Order::join(zip2_16(t01, t23), zip2_16(t45, t67), v + 2);
}

// Eight coordinates of eight tokens; of linear formats their codes. Specialised by the bits of a
// format's two planes.
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
    for (size_t i = 0; i < 2; ++i) {
      const uint8x16_t raw = vld1q_u8(tile + c * 4 + 16 * i);
      Order::join(look_up(this->level, low_nibbles(raw)), look_up(this->level, high_nibbles(raw)),
                  v + 2 * i);
    }
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 2, 0> : FieldTables<kFormat> {
  template <size_t i>
  int8x16_t tokens(uint8x16_t nibbles) const {
    return look_up(i % 2 == 0 ? this->even : this->odd, nibbles);
  }
  void load(const uint8_t* tile, size_t, size_t c, int8x16_t (&v)[4]) const {
    load_fields<Order>(tile + c * 2, *this, v);
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 2, 1> : SignedFieldTables<kFormat> {
  // Signs of eight coordinates, each twice.
  struct Look {
    const ValueTile& tables;
    uint8x16_t signs;
    template <size_t i>
    int8x16_t tokens(uint8x16_t nibbles) const {
      constexpr uint32_t kUp[4] = {0x03040304, 0x01020102, 0xFF00FF00, 0xFDFEFDFE};  // to bit 4
      const uint8x16_t index = vbslq_u8(vdupq_n_u8(16), shift_bytes(signs, kUp[i]), nibbles);
      return vqtbl2q_s8(i % 2 == 0 ? tables.both_even : tables.both_odd, index);
    }
  };
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    const uint8x16_t signs = load_eight(tile + head_dim * 2 + c);
    load_fields<Order>(tile + c * 2, Look{*this, vzip1q_u8(signs, signs)}, v);
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 4, 1> {
  // Each of eight bytes four times.
  int8x16_t repeat[2] = {load_table([](uint32_t i) { return i / 4; }),
                         load_table([](uint32_t i) { return 4 + i / 4; })};
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    const uint8x16_t high = load_eight(tile + head_dim * 4 + c);
    for (size_t i = 0; i < 2; ++i) {
      const uint8x16_t bits = vqtbl1q_u8(high, vreinterpretq_u8_s8(repeat[i]));
      join_nibbles<Order>(vld1q_u8(tile + c * 4 + 16 * i), shift_bytes(bits, 0x01020304),
                          shift_bytes(bits, 0xFDFEFF00), 31, v + 2 * i);
    }
  }
};

template <class Order, uint32_t kFormat>
struct ValueTile<Order, kFormat, 4, 2> {
  void load(const uint8_t* tile, size_t head_dim, size_t c, int8x16_t (&v)[4]) const {
    const int8x16_t high = vreinterpretq_s8_u8(vld1q_u8(tile + head_dim * 4 + c * 2));
    for (size_t i = 0; i < 2; ++i) {
      const uint8x16_t bits =
          vreinterpretq_u8_s8(i == 0 ? zip1_16(high, high) : zip2_16(high, high));
      join_nibbles<Order>(vld1q_u8(tile + c * 4 + 16 * i), shift_words(bits, 0x00020004),
                          shift_words(bits, 0xFFFE0000), 63, v + 2 * i);
    }
  }
};

}  // namespace
}  // namespace gyre::cpu
