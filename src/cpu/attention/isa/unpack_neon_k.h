#pragma once
// NEON's unpacker of K: packed rows become levels, two rows at a time.

#include "cpu/attention/isa/unpack_neon.h"

namespace gyre::cpu {
namespace {

inline uint8x16_t pair_lower(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline uint8x16_t pair_upper(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vtrn2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// 16 stored bytes of two keys. Unpacking works on single bytes, so the order of bytes becomes that
// of the levels. For MMA: the first eight coordinates of both keys, then the last eight.
struct Interleaved {
  uint8x16_t part[2];
  Interleaved(const uint8_t* a, const uint8_t* b) : Interleaved(vld1q_u8(a), vld1q_u8(b)) {}
  Interleaved(uint8x16_t first, uint8x16_t second)
      : part{pair_lower(first, second), pair_upper(first, second)} {}
};

// For dot products: all of the first key, then all of the second.
struct OneByOne {
  uint8x16_t part[2];
  OneByOne(const uint8_t* a, const uint8_t* b) : part{vld1q_u8(a), vld1q_u8(b)} {}
  OneByOne(uint8x16_t first, uint8x16_t second) : part{first, second} {}
};

// Chunk `chunk` of two rows of K, 64 coordinates: levels<j>() gives the 16 from 16 j on, in the
// order of Bytes. Rows have whole groups of 16 bytes.
// Specialised by the bits of a format's two planes.
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
  void levels(const Tables&, int8x16_t (&v)[2]) const {
    const Bytes pair(a + 16 * j, b + 16 * j);
    v[0] = vreinterpretq_s8_u8(pair.part[0]);
    v[1] = vreinterpretq_s8_u8(pair.part[1]);
  }
};

// The low plane of 4, 5 and 6 bits.
template <class Bytes>
struct NibblePair {
  Bytes raw[2];
  NibblePair(const uint8_t* a, const uint8_t* b, size_t chunk)
      : raw{{a + chunk * 32, b + chunk * 32}, {a + chunk * 32 + 16, b + chunk * 32 + 16}} {}
  template <size_t j>
  void look_up_both(int8x16_t table, int8x16_t (&v)[2]) const {
    for (size_t part = 0; part < 2; ++part) {
      const uint8x16_t bytes = raw[j / 2].part[part];
      v[part] = look_up(table, j % 2 == 0 ? low_nibbles(bytes) : high_nibbles(bytes));
    }
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 0> {
  using Tables = NibbleTables<kFormat>;
  NibblePair<Bytes> low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t chunk) : low(a, b, chunk) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.template look_up_both<j>(t.level, v);
  }
};

// 16 coordinates of two rows of tq4: levels<0>() gives them. Of a last group of 16, the bytes are
// eight.
template <class Bytes>
struct Nibbles16 {
  Bytes codes;
  Nibbles16(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t c)
      : codes(load(a, head_dim, c), load(b, head_dim, c)) {}
  template <size_t j>
  void levels(const NibbleTables<abi::kTq4>& t, int8x16_t (&v)[2]) const {
    static_assert(j == 0);
    for (size_t i = 0; i < 2; ++i) v[i] = look_up(t.level, codes.part[i]);
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

// The low plane of 2 and 3 bits.
template <class Bytes, uint32_t kFormat>
struct FieldPair {
  uint8x16_t nibbles[2][2];
  FieldPair(const uint8_t* a, const uint8_t* b, size_t chunk) {
    const Bytes raw(a + chunk * 16, b + chunk * 16);
    for (size_t part = 0; part < 2; ++part) {
      nibbles[0][part] = low_nibbles(raw.part[part]);
      nibbles[1][part] = high_nibbles(raw.part[part]);
    }
  }
  template <size_t j>
  void look_up_both(const FieldTables<kFormat>& t, int8x16_t (&v)[2]) const {
    for (size_t part = 0; part < 2; ++part)
      v[part] = look_up(j % 2 == 0 ? t.even : t.odd, nibbles[j / 2][part]);
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 2, 0> {
  using Tables = FieldTables<kFormat>;
  FieldPair<Bytes, kFormat> low;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t, size_t chunk) : low(a, b, chunk) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.template look_up_both<j>(t, v);
  }
};

// A one-bit plane: 128 coordinates in 16 bytes, bit j of a byte belongs to coordinates 16 j on.
template <class Bytes>
struct BitPair {
  uint8x16_t part[2];
  BitPair(const uint8_t* a, const uint8_t* b, size_t chunk) {
    const Bytes raw(a + chunk / 2 * 16, b + chunk / 2 * 16);
    for (size_t i = 0; i < 2; ++i)
      part[i] = chunk % 2 == 0 ? raw.part[i] : high_nibbles(raw.part[i]);
  }
  template <size_t j>
  uint8x16_t mask(size_t i) const {
    return vtstq_u8(part[i], vdupq_n_u8(1u << j));
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 2, 1> {
  using Tables = FieldTables<kFormat>;
  FieldPair<Bytes, kFormat> low;
  BitPair<Bytes> signs;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t chunk)
      : low(a, b, chunk), signs(a + head_dim / 4, b + head_dim / 4, chunk) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.template look_up_both<j>(t, v);
    for (size_t part = 0; part < 2; ++part)
      v[part] = negate_where(v[part], signs.template mask<j>(part));
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 1> {
  using Tables = NibbleTables<kFormat>;
  NibblePair<Bytes> low;
  BitPair<Bytes> high;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t chunk)
      : low(a, b, chunk), high(a + head_dim / 2, b + head_dim / 2, chunk) {}
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.template look_up_both<j>(t.level, v);
    for (size_t part = 0; part < 2; ++part) {
      const uint8x16_t upper = vandq_u8(high.template mask<j>(part), vdupq_n_u8(32));
      v[part] = vaddq_s8(v[part], vreinterpretq_s8_u8(upper));
    }
  }
};

template <class Bytes, uint32_t kFormat>
struct KeyPair<Bytes, kFormat, 4, 2> {
  using Tables = NibbleTables<kFormat>;
  NibblePair<Bytes> low;
  Bytes high;
  KeyPair(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t chunk)
      : low(a, b, chunk), high(a + head_dim / 2 + chunk * 16, b + head_dim / 2 + chunk * 16) {}
  template <size_t j>
  static uint8x16_t to_place(uint8x16_t bytes) {  // bits 2j and 2j + 1 to 5 and 6
    if constexpr (j == 0) return vshlq_n_u8(bytes, 5);
    if constexpr (j == 1) return vshlq_n_u8(bytes, 3);
    if constexpr (j == 2) return vshlq_n_u8(bytes, 1);
    return vshrq_n_u8(bytes, 1);
  }
  template <size_t j>
  void levels(const Tables& t, int8x16_t (&v)[2]) const {
    low.template look_up_both<j>(t.level, v);
    for (size_t part = 0; part < 2; ++part) {
      const uint8x16_t upper = vandq_u8(to_place<j>(high.part[part]), vdupq_n_u8(0x60));
      v[part] = vaddq_s8(v[part], vreinterpretq_s8_u8(upper));
    }
  }
};

}  // namespace
}  // namespace gyre::cpu
