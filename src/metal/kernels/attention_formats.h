#pragma once
// Attention's way through stored rows: levels from codes, scores of a key, values of a tile. A lane
// has a key of K and some coordinates of V, and every byte is read once.
#include "metal/kernels/attention_layout.h"
#include "metal/kernels/attention_row.h"
#include "metal/kernels/mlx_native_levels.h"

namespace gyre {
namespace metal {

// abi::kv_level without tables, at which GPUs of Apple are slow.
inline float level_of(uint format, uint code) {
  switch (format) {
    case abi::kTq2: {
      const float magnitude = (code & 1) != 0 ? 120.0f : 36.0f;
      return (code & 2) != 0 ? -magnitude : magnitude;
    }
    case abi::kTq3: {
      const float magnitude = static_cast<float>(0x58371F0Au >> (8 * (code & 3)) & 0xFF);
      return (code & 4) != 0 ? -magnitude : magnitude;
    }
    case abi::kTq4: {
      const uint four = (code & 4) != 0 ? 0x6B513F31u : 0x25190F05u;
      const float magnitude = static_cast<float>(four >> (8 * (code & 3)) & 0xFF);
      return (code & 8) != 0 ? -magnitude : magnitude;
    }
    default:
      return static_cast<float>(abi::kv_level(format, code));
  }
}

// A scale times 2^31, and what levels are multiplied with before it, so that neither overflows.
inline float raw_scale(const device uchar* scales, uint block, uint slot, bool wide) {
  const device uchar* const at = scales + 2 * (block * abi::kKvTile + slot);
  const uint bits = wide
                        ? read_cache<ushort>(at)
                        : read_cache<uchar>(at) | static_cast<uint>(read_cache<uchar>(at + 1)) << 8;
  return as_type<float>(bits << 15);
}
constant constexpr float kLevelUnit = 0x1p-16f, kScaleUnit = 0x1p-15f;

// Scale blocks of a head: powers of two, at most 256 coordinates.
inline uint scale_block_size(uint head_dim, uint begin) {
  const uint remainder = head_dim - begin;  // what is left begins with its largest power of two
  const uint size = 1u << (31 - clz(remainder));
  return size < abi::kKvScaleBlock ? size : abi::kKvScaleBlock;
}
// The scale block of a coordinate.
inline uint scale_block_of(uint head_dim, uint coordinate) {
  uint block = 0;
  for (uint begin = 0;; ++block) {
    begin += scale_block_size(head_dim, begin);
    if (coordinate < begin) return block;
  }
}

// 16 bytes of a plane, of which the last group of a row may have fewer.
struct PlaneGroup {
  uint4 words;
  uint bytes;
};
// Byte i, which was 0.
inline void put_byte(thread uint4& words, uint i, uint byte) {
  byte <<= i % 4 * 8;
  words.x |= i < 4 ? byte : 0;
  words.y |= i >= 4 && i < 8 ? byte : 0;
  words.z |= i >= 8 && i < 12 ? byte : 0;
  words.w |= i >= 12 ? byte : 0;
}
inline PlaneGroup read_group(const device uchar* from, uint bytes, bool wide) {
  PlaneGroup group = {{0, 0, 0, 0}, bytes};
  if (wide && bytes == 16) {
    group.words = read_cache<uint4>(from);
    return group;
  }
  for (uint i = 0; i < bytes; ++i) put_byte(group.words, i, read_cache<uchar>(from + i));
  return group;
}
inline uint byte_of(uint4 words, uint i) {
  const uint word = i < 8 ? (i < 4 ? words.x : words.y) : (i < 12 ? words.z : words.w);
  return word >> (i % 4 * 8) & 0xFF;
}

// One plane of a row of K, 16 coordinates at a time.
constant constexpr uint kNoGroup = 0xFFFFFFFFu;
struct PlaneReader {
  const device uchar* from;
  uint bits, head_dim;
  bool wide;
  uint at;  // first coordinate of `group`; none yet: kNoGroup
  PlaneGroup group;

  // Codes of coordinates [c, c + 16), a byte each; c is a multiple of 16.
  uint4 next(uint c) {
    const uint each = abi::kv_group(bits), place = c % each;
    if (at != c - place) {
      at = c - place;
      const uint left = head_dim - at, bytes = left < each ? left * bits / 8 : 16;
      group = read_group(from + at * bits / 8, bytes, wide);
    }
    const uint mask = (1u << bits) - 1;
    if (group.bytes == 16) {
      const uint shift = place / 16 * bits, of_bytes = mask * 0x01010101u;
      return {group.words.x >> shift & of_bytes, group.words.y >> shift & of_bytes,
              group.words.z >> shift & of_bytes, group.words.w >> shift & of_bytes};
    }
    uint4 codes = {0, 0, 0, 0};
    for (uint i = 0; i < 16 && c + i < head_dim; ++i) {
      const uint nth = place + i, field = nth / group.bytes;
      put_byte(codes, i, byte_of(group.words, nth % group.bytes) >> (field * bits) & mask);
    }
    return codes;
  }
};

// One half of a cache as attention reads it.
struct StoredSide {
  const device uchar *codes, *scales;  // of the head
  ulong tile_stride, scales_tile_stride;
  uint format, dim;
  float unit;        // mlx-native formats: mlx_native_unit()
  bool wide;         // rows and tiles begin at multiples of 16
  bool wide_scales;  // scales at multiples of 2, norms of 4
};
inline StoredSide stored_side(const device uchar* codes, const device uchar* scales,
                              constant abi::KvCacheLayout& layout, uint format, uint dim,
                              ulong kv_head, ulong page_stride, bool codes_aligned,
                              bool scales_aligned) {
  const bool tiles = layout.role == 1 && abi::kv_is_native(format);  // V in tiles of eight slots
  StoredSide side = {};
  side.codes = codes + kv_head * layout.codes_head_stride;
  side.scales = scales + kv_head * layout.scales_head_stride;
  side.tile_stride = layout.codes_tile_stride;
  side.scales_tile_stride = layout.scales_tile_stride;
  side.format = format;
  side.dim = dim;
  side.unit = mlx_native_unit(dim, layout.scale_factor);
  const ulong unit = layout.codes_tile_stride / (tiles ? 1 : abi::kKvTile);
  side.wide = codes_aligned && ((layout.codes_head_stride | unit | page_stride) & 15) == 0;
  side.wide_scales =
      scales_aligned &&
      ((layout.scales_head_stride | layout.scales_tile_stride | page_stride) & 3) == 0;
  return side;
}

inline float dense_value(const device uchar* row, uint format, uint c) {
  if (format == kF32) return read_cache<float>(row + 4 * c);
  const ushort bits = read_cache<ushort>(row + 2 * c);
  return format == kF16 ? static_cast<float>(as_type<half>(bits)) : bfloat_to_float(bits);
}

// Norm of coordinate c's part of a row, over the unit of levels.
inline float mlx_native_scale(const thread StoredSide& side, const device uchar* norms, uint c) {
  return read_cache<float>(norms + (side.dim == 512 ? c / 256 * 4 : 0)) / side.unit;
}

// What the values of a key are multiplied with, for one of value_blocks() parts of it.
inline float value_scale(const thread StoredSide& v, const device uchar* tile, uint block,
                         uint slot) {
  if (abi::kv_is_native(v.format)) return raw_scale(tile, block, slot, v.wide_scales);
  return mlx_native_scale(v, tile + slot * (v.scales_tile_stride / abi::kKvTile), block * 256);
}

// Both planes of a row of K.
struct CodeReader {
  PlaneReader low, high;

  uint4 next(uint c) {
    uint4 codes = low.next(c);
    if (high.bits == 0) return codes;
    const uint4 upper = high.next(c);
    codes.x |= upper.x << low.bits;
    codes.y |= upper.y << low.bits;
    codes.z |= upper.z << low.bits;
    codes.w |= upper.w << low.bits;
    return codes;
  }
};
inline CodeReader code_reader(const thread StoredSide& k, const device uchar* row) {
  const uint low_bits = abi::kv_low_bits(k.format), high_bits = abi::kv_high_bits(k.format);
  const ulong low_bytes = abi::kv_plane_bytes(k.dim, low_bits);
  const PlaneGroup none = {{0, 0, 0, 0}, 0};
  return {{row, low_bits, k.dim, k.wide, kNoGroup, none},
          {row + low_bytes, high_bits, k.dim, k.wide && low_bytes % 16 == 0, kNoGroup, none}};
}

// Dot products of a key with the group's rows, by the lane that has the key.
inline void score_levels(const thread StoredSide& k, const device uchar* row,
                         const device uchar* scales, uint slot, const threadgroup float* q,
                         uint pitch, thread float* score) {
  CodeReader reader = code_reader(k, row);
  float sum[kMaxTileRows];
  uint block = 0, block_end = 0;
  for (uint c = 0; c < k.dim; c += 16) {
    const uint4 codes = reader.next(c);
    if (c == block_end) {
      block_end += scale_block_size(k.dim, c);
      GYRE_UNROLL
      for (uint r = 0; r < pitch; ++r) sum[r] = 0;
    }
    for (uint i = 0; i < 16 && c + i < k.dim; ++i) {
      const float level = level_of(k.format, byte_of(codes, i));
      GYRE_UNROLL
      for (uint r = 0; r < pitch; ++r) sum[r] = fma(q[(c + i) * pitch + r], level, sum[r]);
    }
    const uint end = c + 16 < k.dim ? c + 16 : k.dim;
    if (end < block_end) continue;
    const float scale = raw_scale(scales, block, slot, k.wide_scales);
    GYRE_UNROLL
    for (uint r = 0; r < pitch; ++r) score[r] += sum[r] * kLevelUnit * scale * kScaleUnit;
    ++block;
  }
}
inline void score_mlx_native(const thread StoredSide& k, const device uchar* row,
                             const device uchar* norms, const threadgroup float* q, uint pitch,
                             thread float* score) {
  const bool nibbles = k.format == abi::kMlxNative4;
  float scale = 0;
  for (uint c = 0; c < k.dim; c += 2) {
    if (c % 256 == 0) scale = mlx_native_scale(k, norms, c);
    const uint byte = read_cache<uchar>(row + (nibbles ? c / 2 : c));
    const uint second = nibbles ? byte >> 4 : read_cache<uchar>(row + c + 1);
    const float a = mlx_native_level(k.format, nibbles ? byte & 15 : byte) * scale;
    const float b = mlx_native_level(k.format, second) * scale;
    GYRE_UNROLL
    for (uint r = 0; r < pitch; ++r) {
      score[r] = fma(q[c * pitch + r], a, score[r]);
      score[r] = fma(q[(c + 1) * pitch + r], b, score[r]);
    }
  }
}
inline void score_dense(const thread StoredSide& k, const device uchar* row,
                        const threadgroup float* q, uint pitch, thread float* score) {
  uint c = 0;
  if (k.wide && k.format != kF32) {  // eight at a time
    for (; c + 8 <= k.dim; c += 8) {
      const uint4 words = read_cache<uint4>(row + 2 * c);
      for (uint i = 0; i < 8; ++i) {
        const uint word = i < 4 ? (i < 2 ? words.x : words.y) : (i < 6 ? words.z : words.w);
        const ushort bits = static_cast<ushort>(word >> (i % 2 * 16));
        const float value =
            k.format == kF16 ? static_cast<float>(as_type<half>(bits)) : bfloat_to_float(bits);
        GYRE_UNROLL
        for (uint r = 0; r < pitch; ++r) score[r] = fma(q[(c + i) * pitch + r], value, score[r]);
      }
    }
  }
  for (; c < k.dim; ++c) {
    const float value = dense_value(row, k.format, c);
    GYRE_UNROLL
    for (uint r = 0; r < pitch; ++r) score[r] = fma(q[c * pitch + r], value, score[r]);
  }
}
inline void score_key(const thread StoredSide& k, const thread TileAt& at, uint slot,
                      const threadgroup float* q, uint pitch, thread float* score) {
  const device uchar* const row =
      k.codes + at.offset + at.tile * k.tile_stride + slot * (k.tile_stride / abi::kKvTile);
  const device uchar* const scales = k.scales + at.offset + at.tile * k.scales_tile_stride;
  GYRE_UNROLL
  for (uint r = 0; r < pitch; ++r) score[r] = 0;
  if (abi::kv_is_native(k.format)) {
    score_levels(k, row, scales, slot, q, pitch, score);
  } else if (abi::kv_is_mlx_native(k.format)) {
    score_mlx_native(k, row, scales + slot * (k.scales_tile_stride / abi::kKvTile), q, pitch,
                     score);
  } else {
    score_dense(k, row, q, pitch, score);
  }
}

}  // namespace metal
}  // namespace gyre
