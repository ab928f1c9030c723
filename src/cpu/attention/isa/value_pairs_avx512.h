#pragma once
// V whose low plane has two bits, unpacked two tiles at a time with AVX-512: a vector has two
// tokens of each tile, of 16 coordinates. Tile by tile, the four tokens of a coordinate would end
// up in two vectors, and every vector of levels would take a shuffle. All of it anonymous, so that
// each file has its own copy.

#include "cpu/attention/isa/signed_nibbles_avx512.h"
#include "cpu/attention/isa/unpack_v_avx512.h"

namespace gyre::cpu {
namespace {

// Four tokens of each of kChunks * 16 coordinates.
template <size_t kChunks>
struct Operands {
  __m512i at[kChunks];
};

template <uint32_t kFormat>
inline constexpr bool kInPairs = abi::kv_low_bits(kFormat) == 2;

// The bytes of a coordinate in 32 bits: byte 0 of tile a and of tile b, then byte 1 of both. In
// each 128 bits the lower half is a's.
inline constexpr ByteTable kPairBytes =
    repeat_table([](uint32_t i) { return i / 4 * 2 + i % 4 / 2 + i % 2 * 8; });
// A plane of one byte per coordinate in that order: the byte stands for byte 0 and byte 1. In each
// 64 bits the lower half is a's; the kNth chunk of 16 coordinates has the kNth of them.
template <size_t kNth>
inline constexpr ByteTable kPairSigns = repeat_table([](uint32_t i) {
  return kNth * 8 + i / 4 + i % 2 * 4;
});

// 16 * kChunks coordinates of tiles a and b, or fewer with one chunk.
template <uint32_t kFormat, size_t kChunks>
class ValuePairs {
 public:
  ValuePairs(const uint8_t* a, const uint8_t* b, size_t head_dim, size_t c, size_t coordinates) {
    const __m512i by_tile = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    if constexpr (kSigns) {
      const size_t at = 2 * head_dim + c, count = kChunks == 1 ? coordinates : 32;
      const __m512i quarters =
          _mm512_setr_epi32(0, 16, 4, 20, 1, 17, 5, 21, 2, 18, 6, 22, 3, 19, 7, 23);
      const __m512i bytes =
          _mm512_permutex2var_epi32(load(a + at, count), quarters, load(b + at, count));
      signs_[0] = even_signs(Avx512::shuffle(bytes, kPairSigns<0>));
      if constexpr (kChunks == 2) signs_[1] = even_signs(Avx512::shuffle(bytes, kPairSigns<1>));
    }
    for (size_t i = 0; i < kChunks; ++i) {
      const size_t at = 2 * (c + 16 * i), count = kChunks == 1 ? 2 * coordinates : 32;
      const __m512i both =
          _mm512_permutex2var_epi64(load(a + at, count), by_tile, load(b + at, count));
      codes_[i] = Avx512::shuffle(both, kPairBytes);
    }
  }

  // Levels of tokens 2 kGroup and 2 kGroup + 1: of a and b, then of a and b.
  template <uint32_t kGroup>
  Operands<kChunks> levels() const {
    Operands<kChunks> v;
    for (size_t i = 0; i < kChunks; ++i) {
      if constexpr (kSigns) {
        const SignedNibbles nibbles(codes_[i], signs_[i]);
        v.at[i] = Avx512::look_up(kLevels<kFormat, 0>, nibbles.index<kGroup>());
      } else {
        const __m512i codes = kGroup < 2 ? codes_[i] : _mm512_srli_epi16(codes_[i], 4);
        v.at[i] = Avx512::look_up_nibble(kPairLevels<kFormat, kGroup % 2>, codes);
      }
    }
    return v;
  }

 private:
  static constexpr bool kSigns = abi::kv_high_bits(kFormat) != 0;

  // Up to 32 bytes. Head dims are multiples of 8, so these are whole words of 64 bits.
  static __m512i load(const uint8_t* bytes, size_t count) {
    if constexpr (kChunks == 2)
      return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
    const auto words = static_cast<__mmask8>((1u << (count / 8)) - 1);
    return _mm512_castsi256_si512(_mm256_maskz_loadu_epi64(words, bytes));
  }

  // Bit t of a byte of signs is token t's. Where byte 1 stands, with the odd tokens, their bits
  // move to those of the even ones.
  static __m512i even_signs(__m512i signs) {
    return _mm512_and_si512(_mm512_srlv_epi16(signs, _mm512_set1_epi32(0x00010000)),
                            _mm512_set1_epi8(0x55));
  }

  __m512i codes_[kChunks], signs_[kChunks];
};

inline constexpr ByteTable kPairOrder = repeat_table([](uint32_t i) { return i / 2 + i % 2 * 8; });

// Puts weights of two tiles at a time into the order of ValuePairs' tokens.
inline void pair_weights(uint8_t (&bytes)[64]) {
  _mm512_store_si512(bytes, Avx512::shuffle(_mm512_load_si512(bytes), kPairOrder));
}

}  // namespace
}  // namespace gyre::cpu
