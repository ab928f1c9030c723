#pragma once
// Rows of K, four at a time, for files compiled with AVX-512: a vector holds 16 coordinates of
// each, a row to every 128 bits. All of it anonymous, so that each file has its own copy.

#include <cstring>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/signed_nibbles_avx512.h"

namespace gyre::cpu {
namespace {

constexpr size_t kQuad = 4;    // rows in a vector
constexpr size_t kChunk = 16;  // coordinates of a row in a vector

// The dot products multiply an unsigned byte in place of a level: level = 2^kShift operand - kBias.
template <uint32_t kFormat>
struct KeyOperand {
  static constexpr bool kLinear = abi::kv_codec(kFormat).levels == abi::KvLevels::odd;
  static constexpr int kShift = kLinear ? 1 : 0;  // linear codes are multiplied as they are
  static constexpr int32_t kBias = kLinear ? (1 << abi::kv_bits(kFormat)) - 1 : 128;
};

// Biased levels by the low plane's code in bits [2 half, 2 half + 2) (4 bits: [0, 4)) of an index;
// of 3 bits the magnitudes.
template <uint32_t kFormat, uint32_t kHalf>
inline constexpr ByteTable kLowLevels = repeat_table([](uint32_t index) {
  const uint32_t bits = abi::kv_low_bits(kFormat);
  return abi::kv_level(kFormat, index >> (2 * kHalf) & ((1u << bits) - 1)) + 128;
});

// Where a plane has the codes of a chunk that is not part of a whole group: in which of 16 bytes,
// and how far up. Two neighbours lie equally high.
struct alignas(64) ChunkPlace {
  uint8_t byte[64];
  uint8_t bit[64];     // one bit: the code's, as a mask
  uint16_t shift[32];  // more: how far up, of each two bytes
  uint8_t at[64];      // the same in each byte, counted from the lowest of eight
};

// Places of the last chunks of a row, in both planes.
struct QuadTables {
  uint32_t format = 0, head_dim = 0;
  uint32_t low_at = 0, high_at = 0;  // the 16 bytes of a row that hold them
  bool high_repeats = false;         // all chunks of the high plane have the same bytes
  uint32_t row_bytes = 0;
  alignas(64) uint32_t near_words[16];  // of load_near
  ChunkPlace low[8], high[8];  // by the chunk's number from the first that is not in a group
};

template <uint32_t kBits>
uint32_t find_places(uint32_t head_dim, uint32_t plane, uint32_t row_bytes, ChunkPlace* places) {
  constexpr uint32_t kGroup = abi::kv_group(kBits);
  const uint32_t grouped = head_dim / kGroup * kGroup, bytes = (head_dim - grouped) * kBits / 8;
  const uint32_t first = plane + grouped * kBits / 8;
  const uint32_t at = first + 16 <= row_bytes ? first : row_bytes - 16;  // 16 that a row has
  for (uint32_t i = 0; grouped + i < head_dim; ++i) {
    ChunkPlace& place = places[i / kChunk];
    if (i % kChunk == 0) std::memset(&place, 0, sizeof(place));
    for (uint32_t lane = i % kChunk; lane < 64; lane += kChunk) {
      place.byte[lane] = static_cast<uint8_t>(first - at + i % bytes);
      place.bit[lane] = static_cast<uint8_t>(1u << (i / bytes * kBits));
      place.shift[lane / 2] = static_cast<uint16_t>(i / bytes * kBits);
      place.at[lane] = static_cast<uint8_t>(lane % 8 * 8 + i / bytes * kBits);
    }
  }
  return at;
}

// A thread keeps the last ones: a command has one format of K.
thread_local QuadTables kept_quad_tables;

template <uint32_t kFormat>
const QuadTables& find_quad_tables(uint32_t head_dim) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  QuadTables& tables = kept_quad_tables;
  if (tables.format == kFormat && tables.head_dim == head_dim) return tables;
  tables.format = kFormat;
  tables.head_dim = head_dim;
  const uint32_t plane = head_dim * kLow / 8, row_bytes = plane + head_dim * kHigh / 8;
  tables.low_at = find_places<kLow>(head_dim, 0, row_bytes, tables.low);
  if constexpr (kHigh != 0)
    tables.high_at = find_places<kHigh>(head_dim, plane, row_bytes, tables.high);
  const uint32_t high_bytes = head_dim % abi::kv_group(1) / 8;
  tables.row_bytes = row_bytes;
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t row = i / 4 % 2 * row_bytes;  // the second of a pair
    tables.near_words[i] = (i < 8 ? row : 64 + 48 - row_bytes + row) / 4 + i % 4;
  }
  tables.high_repeats = kHigh == 1 && high_bytes != 0 && kChunk % high_bytes == 0;
  return tables;
}

inline __m512i load_quad(const uint8_t* row, size_t stride) {
  const auto at = [&](size_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i * stride));
  };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, at(2), 2), at(3), 3);
}

// load_quad of 16 bytes and of the next 16.
inline void load_two_quads(const uint8_t* row, size_t stride, __m512i& first, __m512i& second) {
  const auto at = [&](size_t i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i * stride));
  };
  const __m512i early = _mm512_inserti64x4(_mm512_castsi256_si512(at(0)), at(1), 1);
  const __m512i late = _mm512_inserti64x4(_mm512_castsi256_si512(at(2)), at(3), 1);
  first = _mm512_shuffle_i64x2(early, late, 0x88);
  second = _mm512_shuffle_i64x2(early, late, 0xDD);
}

// Whether rows are so short that 16 bytes of two of them lie within 64, in words of 32 bits.
inline bool near_rows(const QuadTables& tables, size_t stride) {
  return stride == tables.row_bytes && stride >= 16 && stride <= 48 && stride % 4 == 0;
}
// load_quad of these. Reads from the first row on, and up to the end of the last row's 16 bytes.
inline __m512i load_near(const uint8_t* row, size_t stride, const uint32_t (&words)[16]) {
  const __m512i early = _mm512_loadu_si512(row), late = _mm512_loadu_si512(row + 3 * stride - 48);
  return _mm512_permutex2var_epi32(early, _mm512_load_si512(words), late);
}

// Bit i of every byte.
inline constexpr auto kBitOf = [] {
  struct {
    ByteTable at[8];
  } bits{};
  for (size_t i = 0; i < 8; ++i)
    bits.at[i] = repeat_table([&](uint32_t) { return uint32_t{1} << i; });
  return bits;
}();

inline __m512i bytes_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

inline __m512i right16(__m512i v, int bits) {
  return _mm512_srli_epi16(v, static_cast<unsigned>(bits));
}

// Codes of a chunk outside of whole groups, in the lowest bits; anything may lie above them.
template <uint32_t kBits>
inline __m512i place_bits(__m512i bytes, const ChunkPlace& place) {
  const __m512i moved = _mm512_shuffle_epi8(bytes, _mm512_load_si512(place.byte));
  if constexpr (kBits == 8) return moved;
#if defined(__AVX512VBMI__)
  return _mm512_multishift_epi64_epi8(_mm512_load_si512(place.at), moved);
#else
  return _mm512_srlv_epi16(moved, _mm512_load_si512(place.shift));
#endif
}

// The low plane's part of operands, of codes in the lowest four bits.
template <uint32_t kFormat, uint32_t kHalf>
inline __m512i low_operand(__m512i codes) {
  if constexpr (KeyOperand<kFormat>::kLinear) return _mm512_and_si512(codes, bytes_of(15));
  return Avx512::look_up_nibble(kLowLevels<kFormat, kHalf>, codes);
}

// Chunk kNth of a whole group, or a chunk by its place.
template <uint32_t kFormat, uint32_t kNth>
inline __m512i whole_low(__m512i group) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat);
  if constexpr (kLow == 8) return _mm512_xor_si512(group, bytes_of(0x80));
  return low_operand < kFormat,
         kLow == 2 ? kNth % 2 : 0 > (kNth * kLow >= 4 ? right16(group, 4) : group);
}
template <uint32_t kFormat>
inline __m512i placed_low(__m512i bytes, const ChunkPlace& place) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat);
  const __m512i codes = place_bits<kLow>(bytes, place);
  if constexpr (kLow == 8) return _mm512_xor_si512(codes, bytes_of(0x80));
  return low_operand<kFormat, 0>(codes);
}

// Adds a high plane of one bit: the fifth bit of a code, or a sign.
template <uint32_t kFormat>
inline __m512i add_bit(__m512i low, __mmask64 set) {
  if constexpr (KeyOperand<kFormat>::kLinear)
    return _mm512_mask_add_epi8(low, set, low, bytes_of(16));
  return _mm512_mask_sub_epi8(low, set, _mm512_setzero_si512(), low);  // 128 + x to 128 - x
}

// Bits 0 to 3 of a nibble in bits 0, 2, 4 and 6.
inline constexpr ByteTable kEverySecondBit = repeat_table([](uint32_t index) {
  return (index & 1) | (index & 2) << 1 | (index & 4) << 2 | (index & 8) << 3;
});

// Signs of four chunks of a whole group, its first or its last four, as SignedNibbles wants them.
template <bool kLast>
inline __m512i spread_signs(__m512i group) {
  return Avx512::look_up_nibble(kEverySecondBit, kLast ? right16(group, 4) : group);
}
// Spreads those of the last 64 coordinates of a row: in eight bytes, chunk i in bits 2i and 2i + 1.
inline __m512i spread_last_signs(__m512i bytes, const ChunkPlace& first) {
  const __m512i moved = _mm512_shuffle_epi8(bytes, _mm512_load_si512(first.byte));
  return _mm512_and_si512(_mm512_srlv_epi16(moved, _mm512_load_si512(first.shift)), bytes_of(0x55));
}

#if defined(__AVX512VBMI__)
// Chunk kNth of eight, of magnitudes and signs in whole groups.
template <uint32_t kFormat, uint32_t kNth>
inline __m512i signed_operand(__m512i low, __m512i high) {
  const __m512i codes = kNth % 4 < 2 ? low : right16(low, 4);
  const __m512i signs =
      kNth < 4 ? _mm512_slli_epi16(high, kNth < 2 ? 4 : 2) : (kNth < 6 ? high : right16(high, 2));
  return Avx512::look_up_signed<kFormat, kNth % 2, 128>(codes, signs);
}
#endif

// low | (high & 0x30): two bits above a nibble.
inline __m512i add_two_bits(__m512i low, __m512i high) {
  return _mm512_ternarylogic_epi64(low, high, bytes_of(0x30), 0xF8);
}

// Adds the high plane to chunk `chunk` of a whole group, kNth of four if there are two bits.
template <uint32_t kFormat, uint32_t kNth>
inline __m512i add_whole_high(__m512i low, __m512i group, size_t chunk) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kHigh == 1)
    return add_bit<kFormat>(
        low, _mm512_test_epi8_mask(group, _mm512_load_si512(kBitOf.at[chunk % 8].entry)));
  if constexpr (kHigh == 2) {
    if constexpr (kNth < 2) return add_two_bits(low, _mm512_slli_epi16(group, 4 - 2 * kNth));
    return add_two_bits(low, right16(group, 2 * kNth - 4));
  }
  return low;
}
template <uint32_t kFormat>
inline __m512i add_placed_high(__m512i low, __m512i bytes, const ChunkPlace& place) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kHigh == 1) {
    const __m512i moved = _mm512_shuffle_epi8(bytes, _mm512_load_si512(place.byte));
    return add_bit<kFormat>(low, _mm512_test_epi8_mask(moved, _mm512_load_si512(place.bit)));
  }
  if constexpr (kHigh == 2)
    return add_two_bits(low, _mm512_slli_epi16(place_bits<2>(bytes, place), 4));
  return low;
}

}  // namespace
}  // namespace gyre::cpu
