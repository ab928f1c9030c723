#pragma once
// Stored codes to levels. A word of K's planes holds 4 bytes of a group, a word of V's tile one
// coordinate's tokens; both unpack to two words of four levels, first and second, in the order
// that place_in_eight names. docs/kv_formats.md draws the bytes.
#include "abi/kv_codec.h"
#include "abi/kv_compat.h"
#include "ptx.cuh"

namespace gyre::cuda {

struct Levels8 {
  uint32_t first, second;  // a byte each
};

// Levels as int8, or raised by 128 as uint8.
template <bool kRaised>
constexpr uint32_t kRaise = kRaised ? 0x80808080u : 0u;

constexpr uint32_t level_bytes(uint32_t format, uint32_t first) {
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < 4; ++i)
    bytes |= (static_cast<uint32_t>(abi::kv_level(format, first + i)) & 255u) << (8 * i);
  return bytes;
}

// Eight nibbles, each three bits of magnitude below a sign.
template <bool kRaised>
inline Levels8 levels_of_nibbles(uint32_t w) {
  constexpr uint32_t kLow = level_bytes(abi::kTq4, 0), kHigh = level_bytes(abi::kTq4, 4);
  constexpr uint32_t kOne = 0x01010101u;
  const uint32_t index = w & 0x77777777u, plus = ~w;
  const uint32_t a = permute(kLow, kHigh, index), b = permute(kLow, kHigh, index >> 16);
  // A selector with its top bit spreads the selected byte's sign: 0 for plus, 1 for minus.
  const uint32_t minus_a = permute(kOne, kOne, plus), minus_b = permute(kOne, kOne, plus >> 16);
  // No magnitude is 0: nothing is carried between bytes.
  return {(a ^ minus_a * 255u ^ kRaise<kRaised>)+minus_a,
          (b ^ minus_b * 255u ^ kRaise<kRaised>)+minus_b};
}

// Four codes, one to a byte, of the formats with linear levels or small tables.
template <uint32_t kFormat, bool kRaised>
inline uint32_t levels_of_bytes(uint32_t codes) {
  if constexpr (kFormat == abi::kTq8) {
    return codes ^ kRaise<kRaised>;
  } else if constexpr (kFormat == abi::kTq5 || kFormat == abi::kTq6) {
    // 2 c - top without borrows between bytes: 128 is added, and taken off by flipping a bit.
    constexpr uint32_t kTop = (1u << abi::kv_bits(kFormat)) - 1;
    return (codes * 2 + (128u - kTop) * 0x01010101u) ^ kRaise<!kRaised>;
  } else {
    constexpr uint32_t kLow = level_bytes(kFormat, 0) ^ kRaise<kRaised>;
    constexpr uint32_t kHigh =
        (kFormat == abi::kTq3 ? level_bytes(kFormat, 4) : 0) ^ kRaise<kRaised>;
    return permute(kLow, kHigh, permute(codes | codes >> 4, 0, 0x4420));
  }
}

// Where token or byte-and-piece number i of eight comes out: nibbles of tq4 stay interleaved.
template <uint32_t kFormat>
constexpr uint32_t place_in_eight(uint32_t i) {
  return kFormat == abi::kTq4 ? (i % 4) * 2 + i / 4 : i;
}
template <uint32_t kFormat>
constexpr uint32_t item_in_eight(uint32_t place) {
  return kFormat == abi::kTq4 ? (place % 2) * 4 + place / 2 : place;
}

// Whole groups of every plane of K end here; what follows is decoded one by one.
template <uint32_t kFormat>
constexpr uint32_t whole_groups(uint32_t head_dim) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat), kLow = abi::kv_low_bits(kFormat);
  constexpr uint32_t kGroup = abi::kv_group(kHigh != 0 && kHigh < kLow ? kHigh : kLow);
  constexpr uint32_t kUnit = kGroup < 32 ? 32 : kGroup;
  if (kHigh != 0 && head_dim * kLow / 8 % 4 != 0) return 0;  // a plane that begins inside a word
  return head_dim / kUnit * kUnit;
}

// Item i of eight is coordinate 32 step + 4 j + i % 4 + 16 (i / 4).
template <uint32_t kFormat>
inline Levels8 key_levels(const uint8_t* row, uint32_t head_dim, uint32_t step, uint32_t j) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq8) {
    const auto* const words = reinterpret_cast<const uint32_t*>(row + step * 32);
    return {words[j], words[4 + j]};
  } else {
    constexpr uint32_t kSteps = abi::kv_group(kLow) / 32;
    const uint32_t w = *reinterpret_cast<const uint32_t*>(row + step / kSteps * 16 + 4 * j) >>
                       (step % kSteps * 2 * kLow);
    if constexpr (kFormat == abi::kTq4) return levels_of_nibbles<false>(w);
    constexpr uint32_t kMask = ((1u << kLow) - 1) * 0x01010101u;
    uint32_t first = w & kMask, second = w >> kLow & kMask;
    if constexpr (kHigh != 0) {
      constexpr uint32_t kHighSteps = abi::kv_group(kHigh) / 32;
      constexpr uint32_t kHighMask = ((1u << kHigh) - 1) * 0x01010101u;
      const uint8_t* const plane = row + head_dim * kLow / 8;
      const uint32_t h =
          *reinterpret_cast<const uint32_t*>(plane + step / kHighSteps * 16 + 4 * j) >>
          (step % kHighSteps * 2 * kHigh);
      first |= (h & kHighMask) << kLow;
      second |= (h >> kHigh & kHighMask) << kLow;
    }
    return {levels_of_bytes<kFormat, false>(first), levels_of_bytes<kFormat, false>(second)};
  }
}

template <uint32_t kBits>
inline uint32_t plane_code(const uint8_t* plane, uint32_t head_dim, uint32_t coordinate) {
  constexpr uint32_t kGroup = abi::kv_group(kBits);
  const uint32_t begin = coordinate / kGroup * kGroup, inside = coordinate - begin;
  const uint32_t size = head_dim - begin < kGroup ? head_dim - begin : kGroup;
  const uint32_t bytes = size * kBits / 8;
  return plane[begin * kBits / 8 + inside % bytes] >> (inside / bytes * kBits) &
         ((1u << kBits) - 1);
}

template <uint32_t kFormat>
inline int32_t key_level(const uint8_t* row, uint32_t head_dim, uint32_t coordinate) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  uint32_t code = plane_code<kLow>(row, head_dim, coordinate);
  if constexpr (kHigh != 0)
    code |= plane_code<kHigh>(row + head_dim * kLow / 8, head_dim, coordinate) << kLow;
  return abi::kv_level(kFormat, code);
}

// The same eight as key_levels for any head_dim; coordinates outside [begin, end) count as 0.
template <uint32_t kFormat>
inline Levels8 key_levels_within(const uint8_t* row, uint32_t head_dim, uint32_t at, uint32_t begin,
                                 uint32_t end) {
  uint64_t words = 0;
#pragma unroll 1
  for (uint32_t place = 0; place < 8; ++place) {
    const uint32_t item = item_in_eight<kFormat>(place);
    const uint32_t c = at + item % 4 + item / 4 * 16;
    if (c < begin || c >= end) continue;
    const int32_t level = key_level<kFormat>(row, head_dim, c);
    words |= static_cast<uint64_t>(level & 255) << (place * 8);
  }
  return {static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)};
}

// Bits of a V plane for the tokens 0 to 3 and 4 to 7 of one coordinate, one token to a byte.
inline Levels8 spread_bits(uint32_t x) {
  constexpr uint32_t kSpread = 0x00204081u;  // bit i to byte i
  return {(x & 15) * kSpread & 0x01010101u, (x >> 4) * kSpread & 0x01010101u};
}
inline Levels8 spread_pairs(uint32_t x) {
  return {(x & 0x0303u) | (x << 14 & 0x03030000u), (x >> 4 & 0x0303u) | (x << 10 & 0x03030000u)};
}
template <uint32_t kBits>
inline Levels8 tile_codes(const uint8_t* plane, uint32_t coordinate) {
  if constexpr (kBits == 1) {
    return spread_bits(plane[coordinate]);
  } else if constexpr (kBits == 2) {
    return spread_pairs(reinterpret_cast<const uint16_t*>(plane)[coordinate]);
  } else if constexpr (kBits == 4) {
    const uint32_t x = reinterpret_cast<const uint32_t*>(plane)[coordinate];
    return {x & 0x0F0F0F0Fu, x >> 4 & 0x0F0F0F0Fu};
  } else {
    const uint2 x = reinterpret_cast<const uint2*>(plane)[coordinate];
    return {x.x, x.y};
  }
}

// Item i of eight is token i of the tile; raised.
template <uint32_t kFormat>
inline Levels8 value_levels(const uint8_t* tile, uint32_t head_dim, uint32_t coordinate) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kFormat == abi::kTq4) {
    return levels_of_nibbles<true>(reinterpret_cast<const uint32_t*>(tile)[coordinate]);
  }
  Levels8 codes = tile_codes<kLow>(tile, coordinate);
  if constexpr (kHigh != 0) {
    const Levels8 high = tile_codes<kHigh>(tile + head_dim * kLow, coordinate);
    codes.first |= high.first << kLow;
    codes.second |= high.second << kLow;
  }
  return {levels_of_bytes<kFormat, true>(codes.first),
          levels_of_bytes<kFormat, true>(codes.second)};
}

// Four raised levels as four f16, exactly: under the exponent of 1024 a byte is its own last bits.
inline void to_halves(uint32_t raised, uint32_t& low, uint32_t& high) {
  low = subtract_halves(permute(raised, 0x64646464u, 0x4140), 0x64806480u);
  high = subtract_halves(permute(raised, 0x64646464u, 0x4342), 0x64806480u);
}

// A stored scale without its bias, 2^-31.
inline float raw_scale(const uint8_t* scales, uint32_t block, uint32_t slot) {
  const uint32_t bits = reinterpret_cast<const uint16_t*>(scales)[block * abi::kKvTile + slot];
  return __uint_as_float(bits << 15);
}
constexpr int32_t kScaleBias = -31;

// Scale blocks of a head before a coordinate: how many begin up to it, less one.
inline uint32_t scale_block_of(uint32_t head_dim, uint32_t coordinate) {
  uint32_t block = 0, begin = 0;
#pragma unroll 1
  for (uint32_t size = abi::kKvMaxHeadDim; size != 0; size /= 2) {
    if ((head_dim & size) == 0) continue;
    const uint32_t most = size < abi::kKvScaleBlock ? size : abi::kKvScaleBlock;
    if (coordinate < begin + size) return block + (coordinate - begin) / most;
    block += size / most;
    begin += size;
  }
  return block;
}

// compat: one entry of the codebook, and what it is multiplied with.
template <uint32_t kFormat>
inline float compat_centroid(uint32_t code) {
  constexpr uint32_t kHalf = 1u << (abi::kv_bits(kFormat) - 1);
  code &= 2 * kHalf - 1;
  const uint32_t i = code >= kHalf ? code - kHalf : kHalf - 1 - code;
  float x = 0;
  if constexpr (kFormat == abi::kCompat4) x = abi::kCompat4Centroids[i];
  if constexpr (kFormat == abi::kCompat5) x = abi::kCompat5Centroids[i];
  if constexpr (kFormat == abi::kCompat6) x = abi::kCompat6Centroids[i];
  if constexpr (kFormat == abi::kCompat8) x = abi::kCompat8Centroids[i];
  return code >= kHalf ? x : -x;
}
inline float compat_unit(uint32_t head_dim) {
  return head_dim == 512 ? 1.0f : sqrtf(static_cast<float>(head_dim));
}

}  // namespace gyre::cuda
