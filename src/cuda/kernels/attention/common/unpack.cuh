#pragma once
// Stored codes to levels, of K rows and V tiles: the only unpacker of the CUDA kernels. Words of
// codes become MMA operands (decode, prefill); planes become single codes (kv_dequantize, edges of
// odd head dims). docs/kv_formats.md draws the bytes.
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "abi/kv_mlx_native.h"
#include "cuda/kernels/instructions.cuh"
#include "cuda/kernels/words.cuh"

namespace gyre::cuda {

// What an operand byte holds for a level. Odd levels' codes are u of a level 2 u - kBias: the
// MMA runs over u, and the bias is subtracted once per row or key. tq4 has two forms: u of its own
// table, or, with fewer permutes but two MMAs, two terms whose sum is the level. An MMA takes as
// long as three permutes, so two terms pay up to four rows.
template <uint32_t kFormat, bool kManyRows>
struct LevelForm {
  static constexpr bool kOdd = abi::kv_codec(kFormat).levels == abi::KvLevels::odd;
  static constexpr uint32_t kTerms = kFormat == abi::kTq4 && !kManyRows ? 2 : 1;
  static constexpr bool kHalved = kOdd || (kFormat == abi::kTq4 && kManyRows);
  static constexpr uint32_t kStep = kHalved ? 2 : 1;
  static constexpr uint32_t kBias = !kHalved ? 0
                                    : kOdd   ? (1u << abi::kv_bits(kFormat)) - 1
                                             : abi::kTq4Levels[7];
  // Operand bytes of four neighbouring codes.
  static constexpr uint32_t bytes(uint32_t first) {
    uint32_t x = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      int32_t level = abi::kv_level(kFormat, first + i);
      if (kHalved) level = (level + static_cast<int32_t>(kBias)) / 2;
      if (kTerms == 2 && level > 0) ++level;
      x |= (static_cast<uint32_t>(level) & 255u) << (8 * i);
    }
    return x;
  }
  static constexpr bool exact() {
    bool even = true;
    for (uint32_t code = 0; kHalved && code < 1u << abi::kv_bits(kFormat); ++code)
      even = even && (abi::kv_level(kFormat, code) + static_cast<int32_t>(kBias)) % 2 == 0;
    return even;
  }
  static_assert(exact());
};

// Eight codes as operands: two words of four bytes, for each term.
template <uint32_t kTerms>
struct Operands {
  uint32_t term[kTerms][2];
};

// Levels as byte tables for PRMT. tq4: entries of codes without sign, then entries of codes with
// sign from last to first, see unpack_nibbles.
struct LevelTable {
  uint32_t bytes[4];
};
constexpr uint32_t byte_swap(uint32_t x) {
  return x << 24 | (x & 0xFF00u) << 8 | (x >> 8 & 0xFF00u) | x >> 24;
}
template <uint32_t kFormat, bool kManyRows>
constexpr LevelTable level_table() {
  LevelTable table = {};
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    using Form = LevelForm<kFormat, kManyRows>;
    constexpr uint32_t kCodes = 1u << abi::kv_bits(kFormat), kPlain = kCodes < 8 ? kCodes : 8;
    for (uint32_t i = 0; 4 * i < kPlain; ++i) table.bytes[i] = Form::bytes(4 * i);
    if (kCodes == 16) {
      table.bytes[2] = byte_swap(Form::bytes(12));
      table.bytes[3] = byte_swap(Form::bytes(8));
    }
  }
  return table;
}

// Every second word of a table comes from shared memory, a copy for even and one for odd lanes: the
// compiler rematerializes constants, and what it knows to be warp-uniform, at every use. The other
// words become immediates.
using SharedLevelTable = LevelTable[2];
template <uint32_t kFormat, bool kManyRows>
inline LevelTable load_table(const SharedLevelTable& shared) {
  LevelTable table = level_table<kFormat, kManyRows>();
  table.bytes[0] = shared[threadIdx.x % 2].bytes[0];
  table.bytes[2] = shared[threadIdx.x % 2].bytes[2];
  return table;
}

// Eight nibbles, a sign above three bits. A PRMT selector with its top bit set replicates the sign
// of the selected byte instead: the second table is read with inverted bits, hence from its end.
// With two terms the first table holds |x| + 1, the second -|x|: a plus selects |x| + 1 and -1, a
// minus 0 and -|x|. With one term no byte has a sign, and what is not selected is 0.
template <bool kManyRows>
inline auto unpack_nibbles(const LevelTable& table, uint32_t w) {
  const uint32_t(&t)[4] = table.bytes;
  const uint32_t a = permute(t[0], t[1], w), b = permute(t[0], t[1], upper_half(w));
  const uint32_t c = permute(t[2], t[3], inverted_lower(w));
  const uint32_t d = permute(t[2], t[3], inverted_upper(w));
  if constexpr (kManyRows) {
    return Operands<1>{{{a | c, b | d}}};
  } else {
    return Operands<2>{{{a, b}, {c, d}}};
  }
}

// Eight codes of up to three bits, a nibble each, to bytes of the table.
inline Operands<1> select_levels(const LevelTable& table, uint32_t nibbles) {
  const uint32_t(&t)[4] = table.bytes;
  return {{{permute(t[0], t[1], nibbles), permute(t[0], t[1], upper_half(nibbles))}}};
}

constexpr uint32_t kPairs = 0x33333333u, kThirds = 0x44444444u;

// K. A lane unpacks eight codes of a row per step; operand place 0 to 7 names byte `byte` of word
// `word` in the lane's part of the first plane, and the part of that byte.
struct KeyPlace {
  uint32_t word, byte, part;
};
template <uint32_t kFormat>
constexpr KeyPlace key_place(uint32_t step, uint32_t place) {
  if (kFormat == abi::kTq8) return {2 * step + place / 4, place % 4, 0};
  if (kFormat == abi::kTq4) return {step, place / 2, place % 2};
  if (abi::kv_low_bits(kFormat) == 2) return {step / 2, place / 2, place % 2 * 2 + step % 2};
  return {step, place % 4, place / 4};
}

// The coordinate of K, of levels, that lane j has in operand place 0 to 7 of a step.
template <uint32_t kK>
inline uint32_t key_coordinate(uint32_t step, uint32_t j, uint32_t place) {
  const KeyPlace of = key_place<kK>(step, place);
  return of.word * abi::kv_group(abi::kv_low_bits(kK)) + 4 * j + of.byte + 16 * of.part;
}

// The word of the first plane that holds a step's codes; tq8: the first of two.
template <uint32_t kFormat>
constexpr uint32_t key_word(uint32_t step) {
  return key_place<kFormat>(step, 0).word;
}

// Codes of a step: `low` is its word of the first plane (`next`: tq8's second), `high` the word of
// the second plane, shifted so that the first part lies lowest.
template <uint32_t kFormat, bool kManyRows>
inline auto unpack_key(const LevelTable& table, uint32_t low, uint32_t next, uint32_t high,
                       uint32_t step) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    return Operands<1>{{{low, next}}};
  } else if constexpr (kFormat == abi::kTq4) {
    return unpack_nibbles<kManyRows>(table, low);
  } else if constexpr (abi::kv_low_bits(kFormat) == 4) {
    constexpr uint32_t kMask = ((1u << kHigh) - 1) * 0x01010101u;
    return Operands<1>{{{(low & 0x0F0F0F0Fu) | (high & kMask) << 4,
                         (low >> 4 & 0x0F0F0F0Fu) | (high >> kHigh & kMask) << 4}}};
  } else {
    const uint32_t pairs = low >> (step % 2 * 2) & kPairs;
    if constexpr (kFormat == abi::kTq2) return select_levels(table, pairs);
    // Bits 0 and 2 of a byte, or 1 and 3, go to bits 2 and 6; the mask drops the other products.
    const uint32_t thirds =
        step % 2 == 0 ? (high & 0x05050505u) * 20u & kThirds : (high & 0x0A0A0A0Au) * 10u & kThirds;
    return select_levels(table, pairs | thirds);
  }
}

// As above from quads of coordinates: two of them, a nibble for each code, with the third bit of
// tq3 in `thirds` at its place; or one, a byte for each code, with the bits of the second plane at
// theirs. Bits that are none of the code's may be set.
template <uint32_t kFormat, bool kManyRows>
inline auto unpack_key_nibbles(const LevelTable& table, uint32_t nibbles, uint32_t thirds) {
  if constexpr (kFormat == abi::kTq4) {
    return unpack_nibbles<kManyRows>(table, nibbles);
  } else if constexpr (kFormat == abi::kTq3) {
    return select_levels(table, (nibbles & kPairs) | (thirds & kThirds));
  } else {
    return select_levels(table, nibbles & kPairs);
  }
}
template <uint32_t kFormat>
inline uint32_t unpack_key_bytes(uint32_t low, uint32_t high) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kHigh == 0) return low;
  return (low & 0x0F0F0F0Fu) | (high & ((1u << kHigh) - 1) * 0x10101010u);
}

// V. The token of a tile that operand place 0 to 7 of a coordinate holds, and the other way round.
template <uint32_t kFormat>
constexpr uint32_t value_token(uint32_t place) {
  return abi::kv_has_magnitudes(kFormat) ? place % 2 * 4 + place / 2 : place;
}
template <uint32_t kFormat>
constexpr uint32_t value_place(uint32_t token) {
  return abi::kv_has_magnitudes(kFormat) ? token % 4 * 2 + token / 4 : token;
}

// Bits of tokens 0 to 3 and 4 to 7 of one coordinate, one token to a byte.
struct TokenBytes {
  uint32_t first, second;
};
inline TokenBytes spread_bits(uint32_t x) {
  constexpr uint32_t kSpread = 0x00204081u;  // bit i to byte i
  return {(x & 15) * kSpread & 0x01010101u, (x >> 4) * kSpread & 0x01010101u};
}
inline TokenBytes spread_pairs(uint32_t x) {
  return {(x & 0x0303u) | (x << 14 & 0x03030000u), (x >> 4 & 0x0303u) | (x << 10 & 0x03030000u)};
}

// Eight tokens of each of two coordinates. `low`: their words of the first plane (two words each
// for tq8, one for 4 bits, 16 bits each of one word for 2 bits). `high`: their word of the second
// plane; where that has one bit, the bytes 2 pair and 2 pair + 1 of it.
template <uint32_t kFormat, bool kManyRows, uint32_t kTerms>
inline void unpack_values(const LevelTable& table, const uint32_t* low, uint32_t high,
                          uint32_t pair, Operands<kTerms> (&x)[2]) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    x[0] = {{{low[0], low[1]}}};
    x[1] = {{{low[2], low[3]}}};
  } else if constexpr (kFormat == abi::kTq4) {
    x[0] = unpack_nibbles<kManyRows>(table, low[0]);
    x[1] = unpack_nibbles<kManyRows>(table, low[1]);
  } else if constexpr (abi::kv_low_bits(kFormat) == 4) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t y = low[i];
      TokenBytes of = {};
      if constexpr (kHigh == 2) {
        of = spread_pairs(i == 0 ? high & 0xFFFFu : high >> 16);
      } else if constexpr (kHigh == 1) {
        of = spread_bits(high >> (16 * pair + 8 * i) & 255u);
      }
      x[i] = {{{(y & 0x0F0F0F0Fu) | of.first << 4, (y >> 4 & 0x0F0F0F0Fu) | of.second << 4}}};
    }
  } else {
    // One word has both coordinates, 16 bits each: tokens 0 4 1 5 in its even pairs of bits, 2 6 3
    // 7 in its odd ones. Third bits, a byte for each coordinate, go to the selectors' third bits
    // alike.
    uint32_t even = low[0] & kPairs, odd = low[0] >> 2 & kPairs;
    if constexpr (kHigh != 0) {
      constexpr uint32_t kFifths = 0x00330033u;
      const uint32_t h = permute(high, 0, pair == 0 ? 0x4140 : 0x4342);
      even |= (h & kFifths) * 516u & kThirds;
      odd |= (h & kFifths << 2) * 129u & kThirds;
    }
    const Operands<1> e = select_levels(table, even), o = select_levels(table, odd);
    x[0] = {{{e.term[0][0], o.term[0][0]}}};
    x[1] = {{{e.term[0][1], o.term[0][1]}}};
  }
}

// One-term operands to levels plus 128, as unsigned bytes; flipping each top bit gives int8 levels.
template <uint32_t kFormat>
inline uint32_t raised_levels(uint32_t operand) {
  using Form = LevelForm<kFormat, true>;
  if constexpr (Form::kHalved) return operand * 2 + (128u - Form::kBias) * 0x01010101u;
  return operand ^ 0x80808080u;
}
template <uint32_t kFormat>
inline uint32_t signed_levels(uint32_t operand) {
  return LevelForm<kFormat, true>::kHalved ? raised_levels<kFormat>(operand) ^ 0x80808080u
                                           : operand;
}

// Four raised levels as four f16, exactly: under the exponent of 1024 a byte is its own last bits.
inline void to_f16x2(uint32_t raised, uint32_t& low, uint32_t& high) {
  low = sub_f16x2(permute(raised, 0x64646464u, 0x4140), 0x64806480u);
  high = sub_f16x2(permute(raised, 0x64646464u, 0x4342), 0x64806480u);
}

// One code of a plane of a K row of any head_dim: its last group may be short.
template <uint32_t kBits>
inline uint32_t key_plane_code(const uint8_t* plane, uint32_t head_dim, uint32_t coordinate) {
  constexpr uint32_t kGroup = abi::kv_group(kBits);
  const uint32_t begin = coordinate / kGroup * kGroup, inside = coordinate - begin;
  const uint32_t size = head_dim - begin < kGroup ? head_dim - begin : kGroup;
  const uint32_t bytes = size * kBits / 8;
  return plane[begin * kBits / 8 + inside % bytes] >> (inside / bytes * kBits) &
         ((1u << kBits) - 1);
}
template <uint32_t kFormat>
inline uint32_t key_code(const uint8_t* row, uint32_t head_dim, uint32_t coordinate) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  uint32_t code = key_plane_code<kLow>(row, head_dim, coordinate);
  if constexpr (kHigh != 0)
    code |= key_plane_code<kHigh>(row + abi::kv_plane_bytes(head_dim, kLow), head_dim, coordinate)
            << kLow;
  return code;
}

// One level. Small tables are immediates of a PRMT; indexed constants would be loads.
template <uint32_t kFormat>
inline int32_t level_of(uint32_t code) {
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    constexpr uint32_t kSign = 1u << (abi::kv_bits(kFormat) - 1);
    constexpr auto kMagnitudes = [](uint32_t first) {
      uint32_t bytes = 0;
      for (uint32_t i = first; i < first + 4 && i < kSign; ++i)
        bytes |= static_cast<uint32_t>(abi::kv_level(kFormat, i)) << (8 * (i - first));
      return bytes;
    };
    constexpr uint32_t kLow = kMagnitudes(0), kHigh = kMagnitudes(4);
    const auto magnitude = static_cast<int32_t>(permute(kLow, kHigh, code & (kSign - 1)) & 255u);
    return (code & kSign) != 0 ? -magnitude : magnitude;
  } else {
    return abi::kv_level(kFormat, code);
  }
}

// Eight neighbouring codes from `begin`, a multiple of 8, of a plane of a K row.
template <uint32_t kBits>
inline void key_plane_codes(const uint8_t* plane, uint32_t head_dim, uint32_t begin,
                            uint32_t (&codes)[8]) {
  constexpr uint32_t kGroup = abi::kv_group(kBits), kField = (1u << kBits) - 1;
  const uint32_t group = begin / kGroup, inside = begin % kGroup;
  if ((group + 1) * kGroup > head_dim) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) codes[i] = key_plane_code<kBits>(plane, head_dim, begin + i);
    return;
  }
  uint32_t words[2];
  load_words(plane + 16 * group + inside % 16, words);
  const uint32_t shift = inside / 16 * kBits;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) codes[i] = words[i / 4] >> (8 * (i % 4) + shift) & kField;
}

// The codes of token `token` in a plane of a V tile, eight neighbouring coordinates.
template <uint32_t kBits>
inline void value_plane_codes(const uint8_t* plane, uint32_t token, uint32_t begin,
                              uint32_t (&codes)[8]) {
  constexpr uint32_t kField = (1u << kBits) - 1;
  uint32_t words[2 * kBits];
  load_words(plane + begin * kBits, words);
  const uint32_t shift = 8 * (token % kBits) + token / kBits * kBits;  // in a coordinate's bits
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    if constexpr (kBits == 8) {
      codes[i] = (shift < 32 ? words[2 * i] : words[2 * i + 1]) >> (shift % 32) & kField;
    } else {
      codes[i] = words[i * kBits / 4] >> (i * 8 * kBits % 32 + shift) & kField;
    }
  }
}

// A stored scale without its bias, 2^-31: the bits of a positive float's upper half.
inline float raw_scale(const uint8_t* scales, uint32_t block, uint32_t slot) {
  const uint32_t bits = reinterpret_cast<const uint16_t*>(scales)[block * abi::kKvTile + slot];
  return __uint_as_float(bits << 15);
}
constexpr int32_t kScaleBias = -31;

// One of two raw scales in a word. Multiplications move the bits: they use another pipe than
// permutes. The other scale's lowest bit ends up as the sign, which fabsf drops.
inline float scale_in(uint32_t two, uint32_t half) {
  return half == 0 ? fabsf(__uint_as_float(two * 0x8000u))
                   : __uint_as_float(upper_half(two) * 0x8000u);
}

// mlx-native's formats: a nibble or a byte per coordinate, an entry of the codebook, and what a
// normalised coordinate is multiplied with: to have variance 1, but at 512 as the cache says.
inline uint32_t mlx_native_stored_code(uint32_t format, const uint8_t* row, uint32_t coordinate) {
  if (format == abi::kMlxNative4) return row[coordinate / 2] >> (coordinate % 2 * 4) & 15u;
  return row[coordinate] & ((1u << abi::kv_bits(format)) - 1);
}
template <uint32_t kFormat>
inline float mlx_native_centroid(uint32_t code) {
  constexpr uint32_t kHalf = 1u << (abi::kv_bits(kFormat) - 1);
  const uint32_t i = code >= kHalf ? code - kHalf : kHalf - 1 - code;
  float x = 0;
  if constexpr (kFormat == abi::kMlxNative4) x = abi::kMlxNative4Centroids[i];
  if constexpr (kFormat == abi::kMlxNative5) x = abi::kMlxNative5Centroids[i];
  if constexpr (kFormat == abi::kMlxNative6) x = abi::kMlxNative6Centroids[i];
  if constexpr (kFormat == abi::kMlxNative8) x = abi::kMlxNative8Centroids[i];
  return code >= kHalf ? x : -x;
}
inline float mlx_native_unit(const abi::KvCacheLayout& cache) {
  return cache.head_dim == 512 ? cache.scale_factor : sqrtf(static_cast<float>(cache.head_dim));
}

}  // namespace gyre::cuda
