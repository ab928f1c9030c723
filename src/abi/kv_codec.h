#pragma once
// The compressed formats: numbers and places. docs/kv_formats.md says the same in words and
// pictures; the order of arithmetic written there is part of the format.
#include "abi/types.h"

namespace gyre::abi {

// KvFormat values.
GYRE_CONSTANT uint32_t kTq2 = 16;
GYRE_CONSTANT uint32_t kTq3 = 17;
GYRE_CONSTANT uint32_t kTq4 = 18;
GYRE_CONSTANT uint32_t kTq5 = 19;
GYRE_CONSTANT uint32_t kTq6 = 20;
GYRE_CONSTANT uint32_t kTq8 = 21;
GYRE_CONSTANT uint32_t kMlxNative4 = 32;
GYRE_CONSTANT uint32_t kMlxNative5 = 33;
GYRE_CONSTANT uint32_t kMlxNative6 = 34;
GYRE_CONSTANT uint32_t kMlxNative8 = 35;

GYRE_CONSTANT uint32_t kKvMaxHeadDim = 1024;
GYRE_CONSTANT uint32_t kKvScaleBlock = 256;  // most coordinates under one scale
GYRE_CONSTANT uint32_t kKvMaxBlocks =
    16;  // transform blocks of one head: at most one per power of two
GYRE_CONSTANT uint32_t kKvMaxScales = 16;
GYRE_CONSTANT uint32_t kKvTile = 8;  // tokens in a tile of V, and in a tile of scales

GYRE_CONSTANT uint32_t kFirstNative = kTq2, kLastNative = kTq8;
constexpr bool kv_is_native(uint32_t format) {
  return format >= kFirstNative && format <= kLastNative;
}
constexpr bool kv_is_mlx_native(uint32_t format) {
  return format >= kMlxNative4 && format <= kMlxNative8;
}
constexpr bool kv_is_compressed(uint32_t format) {
  return kv_is_native(format) || kv_is_mlx_native(format);
}
// mlx-native formats: at 512 each half of a row has a norm.
constexpr uint32_t kv_mlx_native_norms(uint64_t head_dim) { return head_dim == 512 ? 2 : 1; }

// Magnitudes that 2 to 4-bit codes stand for (Lloyd-Max centroids of N(0,1) as integers), in units
// of the scale. Those of 4 bits are odd: a level is then 2 u - 107 with u of 7 bits.
GYRE_CONSTANT uint8_t kTq2Levels[2] = {36, 120};
GYRE_CONSTANT uint8_t kTq3Levels[4] = {10, 31, 55, 88};
GYRE_CONSTANT uint8_t kTq4Levels[8] = {5, 15, 25, 37, 49, 63, 81, 107};

// Twice the midpoints between neighbouring magnitudes: integers, so that ceil(2 |v|) > t decides
// exactly.
GYRE_CONSTANT uint8_t kTq2Thresholds[1] = {156};
GYRE_CONSTANT uint8_t kTq3Thresholds[3] = {41, 86, 143};
GYRE_CONSTANT uint8_t kTq4Thresholds[7] = {20, 40, 62, 86, 112, 144, 188};

// How the codes of a native format stand for levels. magnitudes: an index into the list above, sign
// in the top bit. odd: the odd integer 2 code - (2^bits - 1). bytes: the byte is the integer.
enum class KvLevels : uint32_t { magnitudes, odd, bytes };

// What tells the native formats apart, a row each.
struct KvCodec {
  uint32_t bits;
  KvLevels levels;
  // A code is made of gain * coordinate / root mean square of the block (magnitudes: twice the
  // levels per standard deviation where they fit N(0,1) best), or / its largest magnitude.
  float gain;
  // What a scale of V is multiplied by: 1 / sqrt(1 - D), D the error of the magnitudes on N(0,1). A
  // decoded block with the length of the block is short by that much along the block, and averaging
  // over tokens would keep the loss. Keys, and V above 4 bits, keep the length.
  float value_stretch;
};
constexpr KvCodec kv_codec(uint32_t format) {
  switch (format) {
    case kTq2:  // gain 2 / 0.01258624817301284, D = 0.117481911838059
      return {2, KvLevels::magnitudes, 158.90360f, 1.0644817f};
    case kTq3:  // 2 / 0.0244461383835827, D = 0.0345485776769534
      return {3, KvLevels::magnitudes, 81.812515f, 1.0177351f};
    case kTq4:  // 2 / 0.025559356256893873, D = 0.00953290924499739
      return {4, KvLevels::magnitudes, 78.24923f, 1.0048008f};
    case kTq5:
      return {5, KvLevels::odd, 16, 1};
    case kTq6:
      return {6, KvLevels::odd, 32, 1};
    default:
      return {8, KvLevels::bytes, 127, 1};
  }
}
constexpr bool kv_has_magnitudes(uint32_t format) {
  return kv_is_native(format) && kv_codec(format).levels == KvLevels::magnitudes;
}

constexpr uint32_t kv_bits(uint32_t format) {
  switch (format) {
    case kMlxNative4:
      return 4;
    case kMlxNative5:
      return 5;
    case kMlxNative6:
      return 6;
    default:
      return kv_codec(format).bits;
  }
}

// Low plane of a code: nibbles for 4, 5 and 6 bits, pairs for 2 and 3, bytes for 8. The rest is the
// high plane.
constexpr uint32_t kv_low_bits(uint32_t format) {
  const uint32_t bits = kv_bits(format);
  return bits <= 3 ? 2 : (bits == 8 ? 8 : 4);
}
constexpr uint32_t kv_high_bits(uint32_t format) { return kv_bits(format) - kv_low_bits(format); }

constexpr int32_t kv_magnitude(uint32_t format, uint32_t index) {
  return format == kTq2 ? kTq2Levels[index]
                        : (format == kTq3 ? kTq3Levels[index] : kTq4Levels[index]);
}
constexpr int32_t kv_level(uint32_t format, uint32_t code) {
  const KvCodec codec = kv_codec(format);
  const uint32_t sign_bit = 1u << (codec.bits - 1);
  switch (codec.levels) {
    case KvLevels::magnitudes: {
      const int32_t magnitude = kv_magnitude(format, code & (sign_bit - 1));
      return (code & sign_bit) != 0 ? -magnitude : magnitude;
    }
    case KvLevels::odd:
      return 2 * static_cast<int32_t>(code) - static_cast<int32_t>(2 * sign_bit - 1);
    default:
      return static_cast<int8_t>(code);
  }
}
// The code that a block of zeros is filled with.
constexpr uint32_t kv_zero_code(uint32_t format) {
  const KvCodec codec = kv_codec(format);
  return codec.levels == KvLevels::odd ? 1u << (codec.bits - 1) : 0;
}

// A scale is 16 bits: 8 of exponent (bias 158), 8 of mantissa, no sign; all ones and a mantissa is
// NaN. It is a float shifted right by 15 and scaled by 2^31, and reaches from 2^-165 to 2^97: f16
// would lose 1e30 and 1e-30.
GYRE_CONSTANT uint16_t kKvScaleNaN = 0xFFC0;

// Power-of-two blocks of a head, largest first: 80 = 64 + 16, 576 = 512 + 64.
struct KvBlocks {
  uint32_t count;
  uint32_t begin[kKvMaxBlocks];
  uint32_t size[kKvMaxBlocks];
};

inline KvBlocks kv_blocks(uint32_t head_dim) {
  KvBlocks blocks = {};
  uint32_t begin = 0;
  for (uint32_t size = kKvMaxHeadDim; size != 0; size /= 2) {
    if ((head_dim & size) == 0) continue;
    blocks.begin[blocks.count] = begin;
    blocks.size[blocks.count] = size;
    ++blocks.count;
    begin += size;
  }
  return blocks;
}

// Scale blocks of a head: a transform block, or 256 coordinates of a larger one.
struct KvScaleBlocks {
  uint32_t count;
  uint32_t begin[kKvMaxScales];
  uint32_t size[kKvMaxScales];
  uint32_t transform[kKvMaxScales];  // points of the transform it is part of
};

inline KvScaleBlocks kv_scale_blocks(uint32_t head_dim) {
  KvScaleBlocks scales = {};
  const KvBlocks blocks = kv_blocks(head_dim);
  for (uint32_t b = 0; b < blocks.count; ++b) {
    const uint32_t size = blocks.size[b] < kKvScaleBlock ? blocks.size[b] : kKvScaleBlock;
    for (uint32_t part = 0; part < blocks.size[b]; part += size) {
      scales.begin[scales.count] = blocks.begin[b] + part;
      scales.size[scales.count] = size;
      scales.transform[scales.count] = blocks.size[b];
      ++scales.count;
    }
  }
  return scales;
}

// Sign of coordinate j, version 1: the top bit of a 32-bit mix of j (murmur3's finisher over j +
// golden ratio). 1 flips.
constexpr uint32_t kv_sign_bit(uint32_t coordinate) {
  uint32_t h = coordinate + 0x26F7u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h >> 31;
}
GYRE_CONSTANT uint32_t kKvSignsVersion = 1;

// mlx-native's sign table for 512; its first half serves 256. Bit j, least significant first.
GYRE_CONSTANT uint8_t kMlxNativeSigns[64] = {
    0xa7, 0x3b, 0x91, 0xf4, 0x6d, 0xc2, 0x58, 0x0e, 0xb3, 0x7f, 0x24, 0xd6, 0x89, 0x45, 0xea, 0x1c,
    0x63, 0xaf, 0xd8, 0x52, 0x97, 0x0b, 0xe1, 0x3d, 0x76, 0xc4, 0x19, 0xfe, 0x4a, 0x85, 0x2c, 0xdb,
    0xd3, 0x4e, 0xa8, 0x17, 0x9c, 0x5b, 0xe6, 0x31, 0x72, 0xb9, 0x0d, 0xf5, 0x43, 0x8a, 0x6e, 0xc7,
    0x58, 0x2f, 0x94, 0xe1, 0xb6, 0x3d, 0x0a, 0x7c, 0xc5, 0x61, 0xd8, 0x4f, 0xa3, 0x97, 0x1e, 0x85};

// Planes pack in groups: a group of 16 bytes holds 128 / bits coordinates, byte j those at j, j +
// 16, j + 32, ... from the lowest bits up. The last group of a row may be shorter: m coordinates in
// m * bits / 8 bytes, spread likewise.
constexpr uint32_t kv_group(uint32_t bits) { return 128 / bits; }

// Bytes of one row of one plane.
constexpr uint64_t kv_plane_bytes(uint32_t head_dim, uint32_t bits) {
  return uint64_t{head_dim} * bits / 8;
}

}  // namespace gyre::abi
