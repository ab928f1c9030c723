#pragma once
// Codes to their bytes in memory and back (abi/kv_codec.h says where): rows of K, tiles of V, rows
// of the mlx-native formats. A simdgroup packs what lies in the group's memory, a byte a code.
#include "abi/kv_layout.h"
#include "metal/kernels/row.h"

namespace gyre {
namespace metal {

constant constexpr uint kRoleV = 1;  // KvRole

// Four bytes; wide: they begin at a multiple of 4.
inline void store_word(device uchar* to, uint word, bool wide) {
  if (wide) {
    *pointer<uint>(to) = word;
  } else {
    for (uint i = 0; i < 4; ++i) to[i] = static_cast<uchar>(word >> (8 * i));
  }
}
inline uint load_word(const device uchar* from, bool wide) {
  if (wide) return read_cache<uint>(from);
  uint word = 0;
  for (uint i = 0; i < 4; ++i) word |= static_cast<uint>(read_cache<uchar>(from + i)) << (8 * i);
  return word;
}

// Bits [shift, shift + bits) of codes.
struct Plane {
  uint bits, shift;

  uint mask() const { return (1u << bits) - 1; }
  uint fields() const { return 8 / bits; }  // codes in a byte
};
inline Plane low_plane(uint format) { return {abi::kv_low_bits(format), 0}; }
inline Plane high_plane(uint format) {
  return {abi::kv_high_bits(format), abi::kv_low_bits(format)};
}

// Where a coordinate of a row of K is in a plane: the byte, and its field there. The last group of
// a row may be shorter.
struct FieldAddress {
  uint byte, field;
};
inline FieldAddress row_field(const thread Plane& plane, uint coordinate, uint head_dim) {
  const uint group = abi::kv_group(plane.bits), begin = coordinate / group * group;
  const uint remainder = head_dim - begin,
             bytes = remainder < group ? remainder / plane.fields() : 16;
  const uint at = coordinate - begin;
  return {begin / plane.fields() + at % bytes, at / bytes};
}

// A plane of a row of K.
inline void pack_row_plane(const threadgroup uint* codes, uint head_dim, const thread Plane& plane,
                           device uchar* to, bool wide, uint lane) {
  const uint fields = plane.fields(), groups = head_dim / abi::kv_group(plane.bits);
  for (uint i = lane; i < 4 * groups; i += kLanes) {
    const uint first = i / 4 * 4 * fields + i % 4;
    uint word = 0;
    for (uint f = 0; f < fields; ++f)
      word |= (codes[first + 4 * f] >> plane.shift & plane.mask() * 0x01010101u)
              << (plane.bits * f);
    store_word(to + 4 * i, word, wide);
  }
  const threadgroup uchar* const bytes = reinterpret_cast<const threadgroup uchar*>(codes);
  const uint begin = groups * abi::kv_group(plane.bits), remainder = (head_dim - begin) / fields;
  for (uint i = lane; i < remainder; i += kLanes) {
    uint byte = 0;
    for (uint f = 0; f < fields; ++f)
      byte |= (bytes[begin + f * remainder + i] >> plane.shift & plane.mask()) << (plane.bits * f);
    to[16 * groups + i] = static_cast<uchar>(byte);
  }
}
inline void pack_row(const threadgroup uchar* codes, uint format, uint head_dim, device uchar* to,
                     bool wide, uint lane) {
  const threadgroup uint* const words = reinterpret_cast<const threadgroup uint*>(codes);
  const Plane low = low_plane(format), high = high_plane(format);
  const uint low_bytes = head_dim * low.bits / 8;
  pack_row_plane(words, head_dim, low, to, wide, lane);
  if (high.bits != 0)
    pack_row_plane(words, head_dim, high, to + low_bytes, wide && low_bytes % 4 == 0, lane);
}

// A plane of a tile of V: byte i of a coordinate holds tokens i, i + bits, ... `tokens`: which of
// the eight rows are new; the others keep their bits.
inline void pack_tile_plane(const threadgroup uchar* codes, uint tokens, uint head_dim,
                            const thread Plane& plane, device uchar* to, bool wide, uint lane) {
  for (uint i = lane; i < head_dim * plane.bits / 4; i += kLanes) {
    uint word = 0, kept = 0;
    for (uint b = 0; b < 4; ++b) {
      const uint byte = 4 * i + b, coordinate = byte / plane.bits, first = byte % plane.bits;
      for (uint f = 0; f < plane.fields(); ++f) {
        const uint token = first + f * plane.bits, at = 8 * b + f * plane.bits;
        if ((tokens >> token & 1u) != 0) {
          word |= (codes[token * head_dim + coordinate] >> plane.shift & plane.mask()) << at;
        } else {
          kept |= plane.mask() << at;
        }
      }
    }
    if (kept != 0) word |= load_word(to + 4 * i, wide) & kept;
    store_word(to + 4 * i, word, wide);
  }
}
inline void pack_tile(const threadgroup uchar* codes, uint tokens, uint format, uint head_dim,
                      device uchar* to, bool wide, uint lane) {
  const Plane low = low_plane(format), high = high_plane(format);
  pack_tile_plane(codes, tokens, head_dim, low, to, wide, lane);
  if (high.bits != 0)
    pack_tile_plane(codes, tokens, head_dim, high, to + head_dim * low.bits, wide, lane);
}

// A row of an mlx-native format: nibbles or bytes, side by side.
inline void pack_mlx_native_row(const threadgroup uchar* codes, uint format, uint head_dim,
                                device uchar* to, uint lane) {
  const bool nibbles = format == abi::kMlxNative4;
  for (uint i = lane; i < (nibbles ? head_dim / 2 : head_dim); i += kLanes)
    to[i] = nibbles ? static_cast<uchar>(codes[2 * i] | codes[2 * i + 1] << 4) : codes[i];
}

// The code of a coordinate. codes: the tile's.
inline uint stored_bits(const device uchar* codes, constant abi::KvCacheLayout& cache,
                        const thread Plane& plane, ulong plane_begin, uint slot, uint coordinate) {
  if (cache.role == kRoleV) {
    const uint byte = coordinate * plane.bits + slot % plane.bits;
    const uint field = slot / plane.bits;
    return read_cache<uchar>(codes + plane_begin + byte) >> (field * plane.bits) & plane.mask();
  }
  const FieldAddress at = row_field(plane, coordinate, cache.head_dim);
  const device uchar* const row = codes + slot * (cache.codes_tile_stride / abi::kKvTile);
  return read_cache<uchar>(row + plane_begin + at.byte) >> (at.field * plane.bits) & plane.mask();
}
inline uint stored_code(const device uchar* codes, constant abi::KvCacheLayout& cache, uint format,
                        uint slot, uint coordinate) {
  if (abi::kv_is_mlx_native(format)) {
    const device uchar* const row = codes + slot * (cache.codes_tile_stride / abi::kKvTile);
    if (format != abi::kMlxNative4) return read_cache<uchar>(row + coordinate);
    return read_cache<uchar>(row + coordinate / 2) >> (coordinate % 2 * 4) & 15u;
  }
  const Plane low = low_plane(format), high = high_plane(format);
  uint code = stored_bits(codes, cache, low, 0, slot, coordinate);
  if (high.bits != 0) {
    // K: behind a row's low plane; V: behind a tile's.
    const uint row_bits = cache.head_dim * low.bits;
    const ulong begin = cache.role == kRoleV ? row_bits : row_bits / 8;
    code |= stored_bits(codes, cache, high, begin, slot, coordinate) << low.bits;
  }
  return code;
}

}  // namespace metal
}  // namespace gyre
