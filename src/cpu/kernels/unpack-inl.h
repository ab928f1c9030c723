// From stored bytes to numbers, on every target: rows of K and tiles of V become levels, levels
// times scales become rotated coordinates. src/abi/kv_codec.h says where bits lie. Kernels with
// instructions of their own have one more unpacker for each family, attention/isa/unpack_*.h.

#if defined(GYRE_CPU_UNPACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_UNPACK_INL_H
#undef GYRE_CPU_UNPACK_INL_H
#else
#define GYRE_CPU_UNPACK_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/kv_mlx_native.h"
#include "cpu/kernels/native_format.h"
#include "gyre/format.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Bytes of an unpacked row: vectors of 16 may write past head_dim, and past the last row of a tile.
constexpr uint32_t UnpackedStride(uint32_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr uint32_t kUnpackedTileBytes = abi::kKvTile * abi::kKvMaxHeadDim + 16;

// Where the coordinates of the last group of a plane have their bits: a byte of the 16 that end
// where the group does, and the lowest bit of it.
struct BitPlaces {
  alignas(16) uint8_t byte[8 * 16], bit[8 * 16];  // of coordinates that are not there 0
};
struct AllBitPlaces {
  BitPlaces of_bytes[16];  // by the bytes of a group
};
template <uint32_t kBits>
constexpr AllBitPlaces MakeBitPlaces() {
  AllBitPlaces all{};
  for (uint32_t bytes = 1; bytes < 16; ++bytes) {
    for (uint32_t i = 0; i < 8 / kBits * bytes; ++i) {
      all.of_bytes[bytes].byte[i] = static_cast<uint8_t>(16 - bytes + i % bytes);
      all.of_bytes[bytes].bit[i] = static_cast<uint8_t>(1u << (i / bytes * kBits));
    }
  }
  return all;
}
template <uint32_t kBits>
inline constexpr AllBitPlaces kBitPlaces = MakeBitPlaces<kBits>();

// Bits kShift on of the last codes of a row. Going by bytes of the plane instead, as UnpackRowPlane
// does, would load codes that the store before has written in part.
template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void UnpackLastBits(const uint8_t* HWY_RESTRICT end, uint32_t bytes,
                               uint8_t* HWY_RESTRICT codes) {
  const hn::CappedTag<uint8_t, 16> d;
  const BitPlaces& places = kBitPlaces<kBits>.of_bytes[bytes];
  const auto plane = hn::LoadU(d, end - 16);
  for (uint32_t i = 0; i < 8 / kBits * bytes; i += 16) {
    const auto looked_up = hn::TableLookupBytes(plane, hn::Load(d, places.byte + i));
    auto bit = hn::Load(d, places.bit + i), code = hn::LoadU(d, codes + i);
    for (uint32_t nth = 0; nth < kBits; ++nth, bit = hn::Add(bit, bit)) {
      const auto none = hn::Eq(hn::And(looked_up, bit), hn::Zero(d));
      code = hn::Or(
          code, hn::IfThenZeroElse(none, hn::Set(d, static_cast<uint8_t>(1u << (kShift + nth)))));
    }
    hn::StoreU(code, d, codes + i);
  }
}

// One plane of a row of K: its bits go to [kShift, kShift + kBits) of the codes, one byte each.
template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void UnpackRowPlane(const uint8_t* HWY_RESTRICT plane, uint32_t head_dim,
                               uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kGroup = abi::kv_group(kBits), kPerByte = 8 / kBits;
  constexpr auto kMask = static_cast<uint8_t>((1u << kBits) - 1);
  // As many bytes as d has lanes; codes from different bits of a byte lie `apart`.
  const auto unpack = [&](auto d, const uint8_t* from, uint32_t apart, uint8_t* to) HWY_ATTR {
    auto bytes = hn::LoadU(d, from);
    for (uint32_t nth = 0; nth < kPerByte; ++nth, to += apart) {
      auto code = hn::And(bytes, hn::Set(d, kMask));
      if constexpr (kShift != 0) code = hn::Or(hn::ShiftLeft<kShift>(code), hn::LoadU(d, to));
      hn::StoreU(code, d, to);
      if constexpr (kBits != 8) bytes = hn::ShiftRight<kBits % 8>(bytes);
    }
  };
  const hn::CappedTag<uint8_t, 16> whole;
  [[maybe_unused]] const bool long_row = head_dim >= 64;  // 16 bytes and more in its low plane
  for (; head_dim >= kGroup; head_dim -= kGroup, codes += kGroup, plane += 16)
    unpack(whole, plane, 16, codes);
  const uint32_t remainder = head_dim * kBits / 8;  // bytes of the last group
  if (remainder == 0) return;
  if constexpr (kShift != 0) {
    if (long_row) return UnpackLastBits<kBits, kShift>(plane + remainder, remainder, codes);
  }
  if (remainder == 8) return unpack(hn::CappedTag<uint8_t, 8>(), plane, 8, codes);
  if (remainder == 4) return unpack(hn::CappedTag<uint8_t, 4>(), plane, 4, codes);
  // Zeros after them are overwritten by codes of higher bits, by the next row, or change nothing.
  uint8_t bytes[16] = {};
  std::memcpy(bytes, plane, remainder);
  unpack(whole, bytes, remainder, codes);
}

// One plane of a tile of V: the bits of coordinate c of a token go to codes[token * stride + c].
template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void UnpackTilePlane(const uint8_t* HWY_RESTRICT plane, uint32_t head_dim,
                                uint32_t stride, uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kPerByte = 8 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const hn::CappedTag<uint8_t, 16> d;
  // Byte `byte` of 16 coordinates holds tokens byte, byte + kBits, ... from the lowest bits up.
  const auto put = [&](uint32_t c, uint32_t byte, hn::Vec<decltype(d)> bytes) HWY_ATTR {
    for (uint32_t nth = 0; nth < kPerByte; ++nth) {
      uint8_t* const place = codes + size_t{byte + nth * kBits} * stride + c;
      auto code = hn::And(bytes, hn::Set(d, static_cast<uint8_t>(kMask)));
      if constexpr (kShift != 0) code = hn::Or(hn::ShiftLeft<kShift>(code), hn::LoadU(d, place));
      hn::StoreU(code, d, place);
      if constexpr (kBits != 8) bytes = hn::ShiftRight<kBits % 8>(bytes);
    }
  };
  uint32_t c = 0;
  for (; c + 16 <= head_dim; c += 16) {
    const uint8_t* from = plane + size_t{c} * kBits;
    hn::Vec<decltype(d)> v0, v1, v2, v3;
    if constexpr (kBits == 1) {
      put(c, 0, hn::LoadU(d, from));
    } else if constexpr (kBits == 2) {
      hn::LoadInterleaved2(d, from, v0, v1);
      put(c, 0, v0), put(c, 1, v1);
    } else if constexpr (kBits == 4) {
      hn::LoadInterleaved4(d, from, v0, v1, v2, v3);
      put(c, 0, v0), put(c, 1, v1), put(c, 2, v2), put(c, 3, v3);
    } else {
      alignas(16) uint8_t bytes[8][16];  // Highway has no load that transposes by eight
      for (uint32_t i = 0; i < 16; ++i) {
        for (uint32_t token = 0; token < 8; ++token) bytes[token][i] = from[8 * i + token];
      }
      for (uint32_t token = 0; token < 8; ++token) put(c, token, hn::Load(d, bytes[token]));
    }
  }
  for (; c < head_dim; ++c) {
    for (uint32_t token = 0; token < abi::kKvTile; ++token) {
      const uint32_t code =
          plane[size_t{c} * kBits + token % kBits] >> (token / kBits * kBits) & kMask;
      uint8_t& place = codes[size_t{token} * stride + c];
      place = static_cast<uint8_t>(kShift == 0 ? code : place | code << kShift);
    }
  }
}

// Codes to levels, in place, 16 at a time; there is memory for a multiple of 16.
template <uint32_t kFormat>
HWY_INLINE void CodesToLevels(uint32_t count, uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_codec(kFormat).levels == abi::KvLevels::bytes) return;
  const hn::CappedTag<uint8_t, 16> d;
  alignas(16) uint8_t table[16] = {};
  if constexpr (kBits <= 4) {
    for (uint32_t c = 0; c < 1u << kBits; ++c)
      table[c] = static_cast<uint8_t>(abi::kv_level(kFormat, c));
  }
  const auto levels = hn::LoadDup128(d, table);
  for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d))) {
    const auto code = hn::LoadU(d, codes + i);
    if constexpr (kBits <= 4) {
      hn::StoreU(hn::TableLookupBytes(levels, code), d, codes + i);
    } else {
      const auto zero_level = hn::Set(d, static_cast<uint8_t>((1u << kBits) - 1));
      hn::StoreU(hn::Sub(hn::Add(code, code), zero_level), d, codes + i);
    }
  }
}

// Levels of the eight slots of a tile, row by row, `stride` apart: a multiple of 16, and at least
// UnpackedStride(head_dim). What is between rows may be overwritten.
template <uint32_t kFormat>
HWY_INLINE void UnpackTileLevels(const abi::KvCacheLayout& cache, const uint8_t* tile,
                                 uint32_t stride, int8_t* levels) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const uint32_t n = cache.head_dim;
  auto* const codes = reinterpret_cast<uint8_t*>(levels);
  if (cache.role == static_cast<uint32_t>(KvRole::v)) {
    UnpackTilePlane<kLow, 0>(tile, n, stride, codes);
    if constexpr (kHigh != 0)
      UnpackTilePlane<kHigh, kLow>(tile + size_t{n} * kLow, n, stride, codes);
  } else {
    for (uint32_t slot = 0; slot < abi::kKvTile; ++slot) {
      const uint8_t* const row = tile + slot * (cache.codes_tile_stride / abi::kKvTile);
      uint8_t* const to = codes + size_t{slot} * stride;
      UnpackRowPlane<kLow, 0>(row, n, to);
      if constexpr (kHigh != 0)
        UnpackRowPlane<kHigh, kLow>(row + abi::kv_plane_bytes(n, kLow), n, to);
    }
  }
  CodesToLevels<kFormat>(abi::kKvTile * stride, codes);
}

HWY_INLINE void UnpackTileLevels(const abi::KvCacheLayout& cache, const uint8_t* tile,
                                 uint32_t stride, int8_t* levels) {
  with_native_format(cache.format, [&](auto format) HWY_ATTR {
    UnpackTileLevels<decltype(format)::value>(cache, tile, stride, levels);
  });
}

// Levels times scales. The product of the scale and its bias, 2^-31, is exact unless it is
// subnormal; then the bias comes off last, so that no bits are lost in between.
HWY_INLINE void ScaleLevels(const abi::KvScaleBlocks& blocks, const uint8_t* scales, uint32_t slot,
                            const int8_t* levels, float* y) {
  const hn::CappedTag<float, 8> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  for (uint32_t b = 0; b < blocks.count; ++b) {
    uint16_t stored = 0;
    std::memcpy(&stored, scales + size_t{2} * (b * abi::kKvTile + slot), 2);
    const auto raw = std::bit_cast<float>(uint32_t{stored} << 15);
    const bool tiny = raw * 0x1p-31f < 0x1p-126f;
    const auto scale = hn::Set(d, tiny ? raw : raw * 0x1p-31f);
    const size_t begin = blocks.begin[b], end = begin + blocks.size[b];
    for (size_t i = begin; i < end; i += lanes) {
      const auto level = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, levels + i)));
      hn::StoreU(hn::Mul(level, scale), d, y + i);
    }
    for (size_t i = begin; tiny && i < end; ++i) y[i] *= 0x1p-31f;
  }
}

// A row of an mlx-native format, K or V: nibbles or bytes, side by side.
HWY_INLINE void UnpackMlxNativeRow(const abi::KvCacheLayout& cache, const uint8_t* codes_tile,
                                   const uint8_t* scales_tile, uint32_t slot, float* y) {
  const uint8_t* row = codes_tile + slot * (cache.codes_tile_stride / abi::kKvTile);
  float norms[2] = {};
  const uint64_t norm_bytes = cache.scales_tile_stride / abi::kKvTile;
  std::memcpy(norms, scales_tile + slot * norm_bytes, norm_bytes);
  uint8_t codes[abi::kKvMaxHeadDim];
  for (uint32_t i = 0; i < cache.head_dim; ++i) {
    codes[i] = cache.format == abi::kMlxNative4
                   ? static_cast<uint8_t>(row[i / 2] >> (i % 2 * 4) & 15)
                   : row[i];
  }
  decode_mlx_native(cache, codes, norms, y);
}

// Slots [begin, end) of a tile in f32, row `slot` at y + slot * head_dim: rotated coordinates, or
// for dense formats plain ones. Other slots of a dense or mlx_native cache are not read.
HWY_NOINLINE inline void UnpackTile(const abi::KvCacheLayout& cache, const uint8_t* codes,
                                    const uint8_t* scales, Share slots, float* y) {
  const uint64_t n = cache.head_dim;
  if (abi::kv_is_native(cache.format)) {
    alignas(64) int8_t levels[kUnpackedTileBytes];
    const uint32_t stride = UnpackedStride(cache.head_dim);
    UnpackTileLevels(cache, codes, stride, levels);
    const abi::KvScaleBlocks blocks = abi::kv_scale_blocks(cache.head_dim);
    for (uint64_t slot = slots.begin; slot < slots.end; ++slot) {
      ScaleLevels(blocks, scales, static_cast<uint32_t>(slot), levels + slot * stride,
                  y + slot * n);
    }
    return;
  }
  const uint64_t stride = cache.codes_tile_stride / abi::kKvTile;
  for (uint64_t slot = slots.begin; slot < slots.end; ++slot) {
    const uint8_t* const row = codes + slot * stride;
    switch (static_cast<KvFormat>(cache.format)) {
      case KvFormat::f32:
        CopyRow(reinterpret_cast<const float*>(row), y + slot * n, n);
        break;
      case KvFormat::f16:
        CopyRow(reinterpret_cast<const Half*>(row), y + slot * n, n);
        break;
      case KvFormat::bf16:
        CopyRow(reinterpret_cast<const BFloat16*>(row), y + slot * n, n);
        break;
      default:
        UnpackMlxNativeRow(cache, codes, scales, static_cast<uint32_t>(slot), y + slot * n);
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
