#pragma once
// The x86-64 unpackers, one of K and one of V, for vectors of 32 bytes (AVX2) and, in files
// compiled for it, of 64 (AVX-512). All of it anonymous, so that each file has its own copy.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "abi/kv_codec.h"

namespace gyre::cpu {
namespace {

struct alignas(64) ByteTable {
  uint8_t entry[64];
};

// A table of 16 bytes for every 128 bits of a vector.
template <class At>
constexpr ByteTable repeat_table(const At& at) {
  ByteTable table{};
  for (size_t i = 0; i < 64; ++i) table.entry[i] = static_cast<uint8_t>(at(i % 16));
  return table;
}

// Whether a table of 16 has every level; else it goes by the low plane, and 32 times the high plane
// comes on top.
template <uint32_t kFormat>
inline constexpr bool kInTable = abi::kv_bits(kFormat) <= 4;

// Levels plus a bias.
template <uint32_t kFormat, int32_t kBias>
inline constexpr ByteTable kLevels = repeat_table([](uint32_t index) {
  constexpr uint32_t kBits = kInTable<kFormat> ? abi::kv_bits(kFormat) : abi::kv_low_bits(kFormat);
  return abi::kv_level(kFormat, index & ((1u << kBits) - 1)) + kBias;
});

// Levels plus a bias by two 2-bit codes, of which kHalf counts, and by their signs above both: for
// formats with a plane of signs.
template <uint32_t kFormat, uint32_t kHalf, int32_t kBias>
inline constexpr ByteTable kSignedLevels = [] {
  ByteTable table{};
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t code = (i >> (2 * kHalf) & 3) | (i >> (4 + kHalf) & 1) << 2;
    table.entry[i] = static_cast<uint8_t>(abi::kv_level(kFormat, code) + kBias);
  }
  return table;
}();

// 32 bytes: 32 levels of K, or 8 coordinates of V.
struct Avx2 {
  using V = __m256i;

  static V load(const void* bytes) { return _mm256_loadu_si256(static_cast<const V*>(bytes)); }
  static __m128i load_half(const void* bytes) {
    return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
  }
  static V bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static V bit_and(V a, V b) { return _mm256_and_si256(a, b); }
  static V bit_or(V a, V b) { return _mm256_or_si256(a, b); }
  static V bit_xor(V a, V b) { return _mm256_xor_si256(a, b); }
  static V add_bytes(V a, V b) { return _mm256_add_epi8(a, b); }
  static V left16(V a, int bits) { return _mm256_slli_epi16(a, bits); }
  static V right16(V a, int bits) { return _mm256_srli_epi16(a, bits); }
  static V left32(V a, int bits) { return _mm256_slli_epi32(a, bits); }
  static V right32(V a, int bits) { return _mm256_srli_epi32(a, bits); }
  static V look_up(const ByteTable& table, V index) {
    return _mm256_shuffle_epi8(load(table.entry), index);
  }
  // By the lowest four bits of a byte, whatever lies above.
  static V look_up_nibble(const ByteTable& table, V bytes) {
    return look_up(table, bit_and(bytes, bytes_of(15)));
  }

  // Each 16 coordinates of chunk `chunk` get the 16 bytes of their group, shifted so that their
  // bits come lowest.
  template <uint32_t kBits>
  static V groups(const uint8_t* plane, size_t chunk) {
    constexpr size_t kChunks = 4 / kBits;  // in a group
    const V group = _mm256_broadcastsi128_si256(load_half(plane + chunk / kChunks * 16));
    const auto first = static_cast<int64_t>(chunk % kChunks * 2 * kBits);
    const V shifts =
        _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_setr_epi64x(0, 0, kBits, kBits));
    return _mm256_srlv_epi64(group, shifts);
  }

  // The kBits bytes of a coordinate in the lowest bytes of 32 bits.
  template <uint32_t kBits>
  static V words(const uint8_t* plane) {
    if constexpr (kBits == 4) return load(plane);
    if constexpr (kBits == 2) return _mm256_cvtepu16_epi32(load_half(plane));
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane)));
  }

  // Eight bytes of each coordinate: the first four to v[0], the last four to v[1].
  static void split_tokens(const uint8_t* bytes, V (&v)[2]) {
    // Coordinates 0 and 1 beside 4 and 5, so that the shuffle leaves them in order.
    const V a =
        _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(bytes)), load_half(bytes + 32), 1);
    const V b = _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(bytes + 16)),
                                        load_half(bytes + 48), 1);
    const __m256 early = _mm256_castsi256_ps(a), late = _mm256_castsi256_ps(b);
    v[0] = _mm256_castps_si256(_mm256_shuffle_ps(early, late, 0x88));
    v[1] = _mm256_castps_si256(_mm256_shuffle_ps(early, late, 0xDD));
  }
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)
// 64 bytes: 64 levels of K, or 16 coordinates of V.
struct Avx512 {
  using V = __m512i;

  static V load(const void* bytes) { return _mm512_loadu_si512(bytes); }
  static V bytes_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static V bit_and(V a, V b) { return _mm512_and_si512(a, b); }
  static V bit_or(V a, V b) { return _mm512_or_si512(a, b); }
  static V bit_xor(V a, V b) { return _mm512_xor_si512(a, b); }
  static V add_bytes(V a, V b) { return _mm512_add_epi8(a, b); }
  static V left16(V a, int bits) { return _mm512_slli_epi16(a, static_cast<unsigned>(bits)); }
  static V right16(V a, int bits) { return _mm512_srli_epi16(a, static_cast<unsigned>(bits)); }
  static V left32(V a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
  static V right32(V a, int bits) { return _mm512_srli_epi32(a, static_cast<unsigned>(bits)); }
  static V look_up(const ByteTable& table, V index) {
    return _mm512_shuffle_epi8(_mm512_load_si512(table.entry), index);
  }
  // The bytes of each 128 bits that the table names.
  static V shuffle(V bytes, const ByteTable& table) {
    return _mm512_shuffle_epi8(bytes, _mm512_load_si512(table.entry));
  }
#if defined(__AVX512VBMI__)
  // By the lowest six bits of a byte: a table that repeats every 16 entries reads four of them.
  static V look_up_64(const ByteTable& table, V bytes) {
    return _mm512_permutexvar_epi8(bytes, _mm512_load_si512(table.entry));
  }
  static V look_up_nibble(const ByteTable& table, V bytes) { return look_up_64(table, bytes); }
  // Levels by nibbles of codes, and by signs in the two bits above them of other bytes.
  template <uint32_t kFormat, uint32_t kHalf, int32_t kBias>
  static V look_up_signed(V codes, V signs) {
    const V joined = _mm512_ternarylogic_epi64(bytes_of(15), codes, signs, 0xCA);  // a ? b : c
    return look_up_64(kSignedLevels<kFormat, kHalf, kBias>, joined);
  }
#else
  static V look_up_nibble(const ByteTable& table, V bytes) {
    return look_up(table, bit_and(bytes, bytes_of(15)));
  }
#endif

  template <uint32_t kBits>
  static V groups(const uint8_t* plane, size_t chunk) {
    if constexpr (kBits == 4) {  // a chunk is two groups
      const V raw = _mm512_castsi256_si512(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + chunk * 32)));
      const V twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), raw);
      return _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    } else {
      constexpr size_t kChunks = 2 / kBits;  // in a group
      constexpr int64_t kStep = kBits;
      const auto* const at = reinterpret_cast<const __m128i*>(plane + chunk / kChunks * 16);
      const V group = _mm512_broadcast_i32x4(_mm_loadu_si128(at));
      const auto s = static_cast<int64_t>(chunk % kChunks * 4 * kBits);
      return _mm512_srlv_epi64(
          group, _mm512_setr_epi64(s, s, s + kStep, s + kStep, s + 2 * kStep, s + 2 * kStep,
                                   s + 3 * kStep, s + 3 * kStep));
    }
  }

  static void split_tokens(const uint8_t* bytes, size_t coordinates, V (&v)[2]) {
    const V early = load(bytes);
    const V late = coordinates == 16 ? load(bytes + 64) : _mm512_setzero_si512();
    const V even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    v[0] = _mm512_permutex2var_epi32(early, even, late);
    v[1] = _mm512_permutex2var_epi32(early, _mm512_add_epi32(even, _mm512_set1_epi32(1)), late);
  }
};
#endif

// Levels from the codes of both planes, the high one's in the lowest bits of bytes.
template <class Simd, uint32_t kFormat, int32_t kBias>
inline typename Simd::V join_planes(typename Simd::V low, typename Simd::V high) {
  constexpr const ByteTable& kTable = kLevels<kFormat, kBias>;
  if constexpr (kInTable<kFormat>)
    return Simd::look_up(kTable, Simd::bit_or(low, Simd::left16(high, abi::kv_low_bits(kFormat))));
  return Simd::add_bytes(Simd::look_up(kTable, low), Simd::left16(high, 5));
}

template <class Simd, uint32_t kBits>
inline typename Simd::V row_codes(const uint8_t* plane, size_t chunk) {
  return Simd::bit_and(Simd::template groups<kBits>(plane, chunk),
                       Simd::bytes_of((1 << kBits) - 1));
}

// Levels of a row of K, plus kBias, a byte each: as many as Simd has bytes, chunk `chunk` of the
// row. Rows have whole groups of 16 bytes.
template <class Simd, uint32_t kFormat, int32_t kBias>
inline typename Simd::V unpack_k(const uint8_t* row, size_t head_dim, size_t chunk) {
  static_assert(kBias == 0 || kBias == 128);
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kLow == 8) {
    const auto levels = Simd::load(row + chunk * sizeof(typename Simd::V));
    return kBias == 0 ? levels : Simd::bit_xor(levels, Simd::bytes_of(0x80));
  } else if constexpr (kHigh == 0) {
    return Simd::look_up_nibble(kLevels<kFormat, kBias>, Simd::template groups<kLow>(row, chunk));
  } else {
    return join_planes<Simd, kFormat, kBias>(
        row_codes<Simd, kLow>(row, chunk),
        row_codes<Simd, kHigh>(row + head_dim * kLow / 8, chunk));
  }
}

// Codes of four tokens of each coordinate, a byte each: tokens 0 to 3 or, with half 1, 4 to 7.
template <class Simd, uint32_t kBits>
inline typename Simd::V tile_codes(const uint8_t* plane, size_t half) {
  auto x = Simd::template words<kBits>(plane);
  if constexpr (kBits == 4) {
    if (half != 0) x = Simd::right16(x, 4);
  } else if constexpr (kBits == 2) {
    x = half == 0 ? Simd::bit_or(x, Simd::left32(x, 14))
                  : Simd::bit_or(Simd::right32(x, 4), Simd::left32(x, 10));
  } else {
    if (half != 0) x = Simd::right32(x, 4);
    x = Simd::bit_or(x, Simd::left32(x, 7));
    x = Simd::bit_or(x, Simd::left32(x, 14));
  }
  return Simd::bit_and(x, Simd::bytes_of((1 << kBits) - 1));
}

// Levels of coordinates from c on of a tile of V: v[0] has tokens 0 to 3 of each, v[1] tokens 4
// to 7. AVX-512 has its own, unpack_v_avx512.h.
template <class Simd, uint32_t kFormat>
inline void unpack_v(const uint8_t* tile, size_t head_dim, size_t c, typename Simd::V (&v)[2]) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const uint8_t* const low_plane = tile + c * kLow;
  if constexpr (kLow == 8) {
    Simd::split_tokens(low_plane, v);
  } else {
    for (size_t half = 0; half < 2; ++half) {
      const auto low = tile_codes<Simd, kLow>(low_plane, half);
      if constexpr (kHigh == 0) {
        v[half] = Simd::look_up(kLevels<kFormat, 0>, low);
      } else {
        const uint8_t* const high_plane = tile + head_dim * kLow + c * kHigh;
        v[half] = join_planes<Simd, kFormat, 0>(low, tile_codes<Simd, kHigh>(high_plane, half));
      }
    }
  }
}

}  // namespace
}  // namespace gyre::cpu
