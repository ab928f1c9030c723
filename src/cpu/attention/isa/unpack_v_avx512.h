#pragma once
// Tiles of V unpacked with AVX-512, 16 or 32 coordinates at a time: a vector has four tokens of 16
// coordinates, v[0] tokens 0 to 3 and v[1] tokens 4 to 7. All of it anonymous, so that each file
// has its own copy.

#include "cpu/attention/isa/unpack_x86.h"

namespace gyre::cpu {
namespace {

// Whether codes can be multiplied in place of levels: a level is 2 code - kValueBias then.
template <uint32_t kFormat>
inline constexpr bool kLinearCodes = abi::kv_codec(kFormat).levels == abi::KvLevels::odd;
template <uint32_t kFormat>
inline constexpr int32_t kValueBias = (1 << abi::kv_bits(kFormat)) - 1;

// As many bytes as `coordinates` up to 16 * kChunks coordinates have, kBytes each, and zeros.
template <uint32_t kBytes, size_t kChunks>
inline __m512i load_values(const uint8_t* bytes, size_t coordinates) {
  static_assert(kBytes * kChunks <= 4);
  if constexpr (kBytes * kChunks == 4) {
    if (coordinates == 16 * kChunks) return _mm512_loadu_si512(bytes);
  }
  // Head dims are multiples of 8, so these are whole words of 64 bits.
  return _mm512_maskz_loadu_epi64(static_cast<__mmask8>((1u << (coordinates * kBytes / 8)) - 1),
                                  bytes);
}

inline __m512i low_nibbles(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }

// Two bytes of each of 16 * kChunks coordinates, so that unpacking words leaves them in order.
template <size_t kChunks>
inline __m512i load_pairs(const uint8_t* bytes, size_t coordinates) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                  load_values<2, kChunks>(bytes, coordinates));
}

// The levels, or magnitudes, of 2-bit codes: token t lies in byte t % 2, from bit t / 2 * 2 on.
template <uint32_t kFormat, uint32_t kHalf>
inline constexpr ByteTable kPairLevels = repeat_table([](uint32_t index) {
  return abi::kv_level(kFormat, index >> (2 * kHalf) & 3);
});

template <uint32_t kFormat>
inline void unpack_pairs(const uint8_t* plane, size_t coordinates, __m512i (&v)[2]) {
  const __m512i bytes = load_pairs<1>(plane, coordinates);
  const __m512i nibbles[2] = {bytes, _mm512_srli_epi16(bytes, 4)};
  for (size_t half = 0; half < 2; ++half) {
    const __m512i early = Avx512::look_up_nibble(kPairLevels<kFormat, 0>, nibbles[half]);
    const __m512i late = Avx512::look_up_nibble(kPairLevels<kFormat, 1>, nibbles[half]);
    v[half] = _mm512_unpacklo_epi16(early, late);
  }
}

#if defined(__AVX512VBMI__) && defined(__GFNI__)
// Which byte of a plane of one bit, and of its copy 32 bytes on, stands at each of load_pairs'.
inline constexpr ByteTable kSignBytes = [] {
  ByteTable table{};
  for (uint32_t i = 0; i < 64; ++i)
    table.entry[i] = static_cast<uint8_t>(i % 2 * 32 + (i / 16 + i / 8 % 2 * 4) * 4 + i / 2 % 4);
  return table;
}();

// 2-bit magnitudes and, in a plane of its own, signs: token t's is bit t of a byte. Signs get above
// the magnitudes of two tokens at a time.
template <uint32_t kFormat>
inline void unpack_signed_pairs(const uint8_t* plane, const uint8_t* high_plane, size_t coordinates,
                                __m512i (&v)[2]) {
  const __m512i bytes = load_pairs<1>(plane, coordinates);
  const auto words = static_cast<__mmask8>((1u << (coordinates / 8)) - 1);
  const __m512i signs = _mm512_broadcast_i64x4(_mm256_maskz_loadu_epi64(words, high_plane));
  // Bits 0, 2, 4 and 6 become 4 to 7; of the copy bits 1, 3, 5 and 7.
  constexpr int64_t kEven = 0x01041040, kOdd = 2 * kEven;
  const __m512i gather = _mm512_setr_epi64(kEven, kEven, kEven, kEven, kOdd, kOdd, kOdd, kOdd);
  const __m512i in_order = _mm512_permutexvar_epi8(_mm512_load_si512(kSignBytes.entry),
                                                   _mm512_gf2p8affine_epi64_epi8(signs, gather, 0));
  const __m512i low[2] = {bytes, _mm512_srli_epi16(bytes, 4)};
  const __m512i high[2] = {in_order, _mm512_srli_epi16(in_order, 2)};
  for (size_t half = 0; half < 2; ++half) {
    const __m512i early = Avx512::look_up_signed<kFormat, 0, 0>(low[half], high[half]);
    const __m512i late = Avx512::look_up_signed<kFormat, 1, 0>(low[half], high[half]);
    v[half] = _mm512_unpacklo_epi16(early, late);
  }
}
#endif

// Codes of a plane of nibbles: token t lies in byte t % 4.
inline void unpack_nibbles(const uint8_t* plane, size_t coordinates, __m512i (&v)[2]) {
  const __m512i bytes = load_values<4, 1>(plane, coordinates);
  v[0] = low_nibbles(bytes);
  v[1] = low_nibbles(_mm512_srli_epi16(bytes, 4));
}

// For each token of v[half] whether its bit is set in a plane of one bit: bit t of a byte.
inline void unpack_bits(const uint8_t* plane, size_t coordinates, __mmask64 (&set)[2]) {
  const __m128i bytes = coordinates == 16
                            ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(plane))
                            : _mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane));
  const __m512i four = _mm512_shuffle_epi8(
      _mm512_broadcast_i32x4(bytes),
      _mm512_set_epi32(0x0F0F0F0F, 0x0E0E0E0E, 0x0D0D0D0D, 0x0C0C0C0C, 0x0B0B0B0B, 0x0A0A0A0A,
                       0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                       0x03030303, 0x02020202, 0x01010101, 0));
  set[0] = _mm512_test_epi8_mask(four, _mm512_set1_epi32(0x08040201));
  set[1] = _mm512_test_epi8_mask(four, _mm512_set1_epi32(static_cast<int>(0x80402010)));
}

// Adds a plane of two bits above nibbles.
template <size_t kChunks>
inline void add_high_pairs(const uint8_t* plane, size_t coordinates, __m512i (&v)[kChunks][2]) {
  const __m512i bytes = load_pairs<kChunks>(plane, coordinates);
  const __m512i mask = _mm512_set1_epi8(0x30);
  for (size_t i = 0; i < kChunks; ++i) {
    const __m512i twice =
        i == 0 ? _mm512_unpacklo_epi16(bytes, bytes) : _mm512_unpackhi_epi16(bytes, bytes);
    // In each group of four tokens the first two lie two bits lower than the last two.
    const __m512i early = _mm512_sllv_epi16(twice, _mm512_set1_epi32(0x00020004));
    const __m512i late = _mm512_srlv_epi16(twice, _mm512_set1_epi32(0x00020000));
    v[i][0] = _mm512_ternarylogic_epi64(v[i][0], early, mask, 0xF8);  // a | (b & c)
    v[i][1] = _mm512_ternarylogic_epi64(v[i][1], late, mask, 0xF8);
  }
}

// Levels of coordinates from c on of a tile of V, or codes (kLinearCodes): 16 * kChunks of them, or
// fewer with one chunk. Two bits or three are unpacked one chunk at a time; value_pairs_avx512.h
// has a faster way, in another order of tokens.
template <uint32_t kFormat, size_t kChunks>
inline void unpack_v_operands(const uint8_t* tile, size_t head_dim, size_t c, size_t coordinates,
                              __m512i (&v)[kChunks][2]) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const uint8_t* const low_plane = tile + c * kLow;
  const uint8_t* const high_plane = tile + head_dim * kLow + c * kHigh;
#if defined(__AVX512VBMI__) && defined(__GFNI__)
  if constexpr (kFormat == abi::kTq3)
    return unpack_signed_pairs<kFormat>(low_plane, high_plane, coordinates, v[0]);
#endif
  static_assert(kLow != 2 || kChunks == 1);
  if constexpr (kLow == 2) unpack_pairs<kFormat>(low_plane, coordinates, v[0]);
  if constexpr (kFormat == abi::kTq6) {
    for (size_t i = 0; i < kChunks; ++i)
      unpack_nibbles(low_plane + 64 * i, kChunks == 1 ? coordinates : 16, v[i]);
    return add_high_pairs<kChunks>(high_plane, coordinates, v);
  }
  for (size_t i = 0; i < kChunks; ++i) {
    const size_t here = kChunks == 1 ? coordinates : 16;
    if constexpr (kLow == 8) Avx512::split_tokens(low_plane + 128 * i, here, v[i]);
    if constexpr (kFormat == abi::kTq4) {
      const __m512i bytes = load_values<4, 1>(low_plane + 64 * i, here);
      v[i][0] = Avx512::look_up_nibble(kLevels<kFormat, 0>, bytes);
      v[i][1] = Avx512::look_up_nibble(kLevels<kFormat, 0>, _mm512_srli_epi16(bytes, 4));
    } else if constexpr (kLow == 4) {
      unpack_nibbles(low_plane + 64 * i, here, v[i]);
    }
    if constexpr (kHigh == 1) {
      __mmask64 set[2];
      unpack_bits(high_plane + 16 * i, here, set);
      for (size_t half = 0; half < 2; ++half) {
        __m512i& x = v[i][half];
        x = kLinearCodes<kFormat> ? _mm512_mask_add_epi8(x, set[half], x, _mm512_set1_epi8(16))
                                  : _mm512_mask_sub_epi8(x, set[half], _mm512_setzero_si512(), x);
      }
    }
  }
}

// Levels of up to 16 coordinates from c on.
template <uint32_t kFormat>
inline void unpack_v_levels(const uint8_t* tile, size_t head_dim, size_t c, size_t coordinates,
                            __m512i (&v)[2]) {
  __m512i operands[1][2];
  unpack_v_operands<kFormat, 1>(tile, head_dim, c, coordinates, operands);
  for (size_t half = 0; half < 2; ++half) {
    v[half] = operands[0][half];
    if constexpr (kLinearCodes<kFormat>)
      v[half] = _mm512_sub_epi8(_mm512_add_epi8(v[half], v[half]),
                                _mm512_set1_epi8(static_cast<char>(kValueBias<kFormat>)));
  }
}

}  // namespace
}  // namespace gyre::cpu
