#pragma once
// NEON's unpacker of K: packed rows become levels, two rows at a time.

#include "cpu/attention/isa/unpack_neon.h"

namespace gyre::cpu {
namespace {

// 16 stored bytes of two keys as two vectors. Unpacking works on single bytes, so the order of
// bytes becomes that of the levels. For MMA: the first eight coordinates of both keys, then the
// last eight. Loads are cheap and registers few: each vector loads both keys.
struct Interleaved {
  static uint8x16_t part(size_t i, uint8x16_t first, uint8x16_t second) {
    const uint64x2_t a = vreinterpretq_u64_u8(first), b = vreinterpretq_u64_u8(second);
    return vreinterpretq_u8_u64(i == 0 ? vtrn1q_u64(a, b) : vtrn2q_u64(a, b));
  }
  static uint8x16_t part(size_t i, const uint8_t* a, const uint8_t* b) {
    return part(i, vld1q_u8(a), vld1q_u8(b));
  }
};

// For dot products: all of the first key, then all of the second.
struct OneByOne {
  static uint8x16_t part(size_t i, uint8x16_t first, uint8x16_t second) {
    return i == 0 ? first : second;
  }
  static uint8x16_t part(size_t i, const uint8_t* a, const uint8_t* b) {
    return vld1q_u8(i == 0 ? a : b);
  }
};

// Chunk `chunk` of two rows of K, 64 coordinates: level<j>(tables, i) gives the 16 from 16 j on of
// both, vector i of two in the order of Bytes; of linear formats their codes. Rows have whole
// groups of 16 bytes. Specialised by the bits of a format's two planes.
template <class Bytes, uint32_t kFormat, uint32_t kLow = abi::kv_low_bits(kFormat),
          uint32_t kHigh = abi::kv_high_bits(kFormat)>
struct KeyPair;

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 8, 0> {
  struct Tables {};
  const uint8_t *a, *b;
  KeyPair(const uint8_t* first, const uint8_t* second, size_t, size_t chunk)
      : a(first + chunk * 64), b(second + chunk * 64) {}
  template <size_t j>
  int8x16_t level(const Tables&, size_t i) const {
    return as_signed(Bytes::part(i, a + 16 * j, b + 16 * j));
  }
};

// The low plane of 4, 5 and 6 bits.
template <class Bytes>
struct NibblePair {
  const uint8_t *a, *b;
  NibblePair(const uint8_t* first, const uint8_t* second, size_t chunk)
      : a(first + chunk * 32), b(second + chunk * 32) {}
  // Coordinates 16 j on lie in the low nibbles if j is even, in the high ones otherwise.
  template <size_t j>
  uint8x16_t bytes(size_t i) const {
    return Bytes::part(i, a + j / 2 * 16, b + j / 2 * 16);
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 0> {
  using Tables = NibbleTables<kFormat>;
  NibblePair<Bytes> low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t chunk) : low(a, b, chunk) {}
  template <size_t j>
  int8x16_t level(const Tables& t, size_t i) const {
    const uint8x16_t bytes = low.template bytes<j>(i);
    return look_up(t.level, j % 2 == 0 ? low_nibbles(bytes) : high_nibbles(bytes));
  }
};

// 16 coordinates of two rows of tq4: level<0>() gives them. Of a last group of 16, the bytes are
// eight.
template <class Bytes>
struct Nibbles16 {
  uint8x16_t first, second;
  Nibbles16(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t c)
      : first(load(a, head_dim, c)), second(load(b, head_dim, c)) {}
  template <size_t j>
  int8x16_t level(const NibbleTables<abi::kTq4>& t, size_t i) const {
    static_assert(j == 0);
    return look_up(t.level, Bytes::part(i, first, second));
  }

 private:
  static uint8x16_t load(const uint8_t* row, size_t head_dim, size_t c) {
    if (c % 32 == 0 && c + 32 > head_dim) {
      const uint8x8_t bytes = vld1_u8(row + c / 2);
      return vcombine_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4));
    }
    const uint8x16_t bytes = vld1q_u8(row + c / 32 * 16);
    return c % 32 == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
  }
};

// The low plane of 2 and 3 bits: the nibbles that have coordinates 16 j on in their lower two bits
// if j is even, in their upper two otherwise.
template <class Bytes>
struct FieldPair {
  const uint8_t *a, *b;
  FieldPair(const uint8_t* first, const uint8_t* second, size_t chunk)
      : a(first + chunk * 16), b(second + chunk * 16) {}
  template <size_t j>
  uint8x16_t nibbles(size_t i) const {
    const uint8x16_t bytes = Bytes::part(i, a, b);
    return j < 2 ? low_nibbles(bytes) : high_nibbles(bytes);
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 2, 0> {
  using Tables = FieldTables<kFormat>;
  FieldPair<Bytes> low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t chunk) : low(a, b, chunk) {}
  template <size_t j>
  int8x16_t level(const Tables& t, size_t i) const {
    return look_up(j % 2 == 0 ? t.even : t.odd, low.template nibbles<j>(i));
  }
};

// A one-bit plane: 128 coordinates in 16 bytes, bit j of a byte belongs to coordinates 16 j on.
template <class Bytes>
struct BitPair {
  const uint8_t *a, *b;
  int32_t up;  // what moves bit 0 of the chunk to bit 4
  BitPair(const uint8_t* first, const uint8_t* second, size_t chunk)
      : a(first + chunk / 2 * 16),
        b(second + chunk / 2 * 16),
        up(4 - 4 * static_cast<int32_t>(chunk % 2)) {}
  // In bit 4; the others may be anything.
  template <size_t j>
  uint8x16_t bit(size_t i) const {
    const int32_t shift = up - static_cast<int32_t>(j);
    return vshlq_u8(Bytes::part(i, a, b), vdupq_n_s8(static_cast<int8_t>(shift)));
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 2, 1> {
  using Tables = SignedFieldTables<kFormat>;
  FieldPair<Bytes> low;
  BitPair<Bytes> signs;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t chunk)
      : low(a, b, chunk), signs(a + head_dim / 4, b + head_dim / 4, chunk) {}
  template <size_t j>
  int8x16_t level(const Tables& t, size_t i) const {
    const uint8x16_t index =
        vbslq_u8(vdupq_n_u8(16), signs.template bit<j>(i), low.template nibbles<j>(i));
    return vqtbl2q_s8(j % 2 == 0 ? t.both_even : t.both_odd, index);
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 1> {
  struct Tables {};
  NibblePair<Bytes> low;
  BitPair<Bytes> high;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t chunk)
      : low(a, b, chunk), high(a + head_dim / 2, b + head_dim / 2, chunk) {}
  template <size_t j>
  int8x16_t level(const Tables&, size_t i) const {
    const uint8x16_t nibbles = low.template bytes<j>(i), bit = high.template bit<j>(i);
    const uint8x16_t code =
        j % 2 == 0 ? vbslq_u8(vdupq_n_u8(15), nibbles, bit) : vsriq_n_u8(bit, nibbles, 4);
    return as_signed(vandq_u8(code, vdupq_n_u8(31)));
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 2> {
  struct Tables {};
  NibblePair<Bytes> low;
  const uint8_t *a, *b;
  KeyPair(const uint8_t* first, const uint8_t* second, size_t head_dim, size_t chunk)
      : low(first, second, chunk),
        a(first + head_dim / 2 + chunk * 16),
        b(second + head_dim / 2 + chunk * 16) {}
  // Bits 2j and 2j + 1 of the high plane above a nibble; higher ones may be anything.
  template <size_t j>
  static uint8x16_t join(uint8x16_t nibbles, uint8x16_t bits) {
    if constexpr (j == 0) return vsliq_n_u8(nibbles, bits, 4);
    if constexpr (j == 1) return vsriq_n_u8(vshlq_n_u8(bits, 2), nibbles, 4);
    if constexpr (j == 2) return vbslq_u8(vdupq_n_u8(15), nibbles, bits);
    return vsriq_n_u8(vshrq_n_u8(bits, 2), nibbles, 4);
  }
  template <size_t j>
  int8x16_t level(const Tables&, size_t i) const {
    const uint8x16_t code = join<j>(low.template bytes<j>(i), Bytes::part(i, a, b));
    return as_signed(j == 3 ? code : vandq_u8(code, vdupq_n_u8(63)));
  }
};

}  // namespace
}  // namespace gyre::cpu
