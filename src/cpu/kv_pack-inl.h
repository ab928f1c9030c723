// Codes to and from their places in memory (src/abi/kv_codec.h says where).

#if defined(GYRE_CPU_KV_PACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_PACK_INL_H
#undef GYRE_CPU_KV_PACK_INL_H
#else
#define GYRE_CPU_KV_PACK_INL_H
#endif

#include <algorithm>
#include <cstdint>

#include "abi/kv_codec.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DBytes = hn::CappedTag<uint8_t, 16>;

// Bits [kShift, kShift + kBits) of a row's codes, as one plane of a row of K.
template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void PackPlane(const uint8_t* HWY_RESTRICT codes, uint32_t head_dim,
                          uint8_t* HWY_RESTRICT plane) {
  constexpr uint32_t kGroup = abi::kv_group(kBits), kPieces = 8 / kBits;
  constexpr auto kMask = static_cast<uint8_t>((1u << kBits) - 1);
  const DBytes d;
  uint32_t begin = 0;
  for (; begin + kGroup <= head_dim; begin += kGroup, plane += 16) {
    for (uint32_t j = 0; j < 16; j += static_cast<uint32_t>(hn::Lanes(d))) {
      auto byte = hn::Zero(d);
      for (uint32_t piece = kPieces; piece-- > 0;) {
        auto code = hn::LoadU(d, codes + begin + size_t{16} * piece + j);
        if (kShift != 0) code = hn::ShiftRight<kShift>(code);
        if (kBits != 8) byte = hn::ShiftLeft<kBits % 8>(byte);
        byte = hn::Or(byte, hn::And(code, hn::Set(d, kMask)));
      }
      hn::StoreU(byte, d, plane + j);
    }
  }
  const uint32_t rest = (head_dim - begin) * kBits / 8;
  for (uint32_t j = 0; j < rest; ++j) {
    uint32_t byte = 0;
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      byte |= (codes[begin + piece * rest + j] >> kShift & kMask) << (piece * kBits);
    }
    plane[j] = static_cast<uint8_t>(byte);
  }
}

template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void UnpackPlane(const uint8_t* HWY_RESTRICT plane, uint32_t head_dim,
                            uint8_t* HWY_RESTRICT codes) {
  constexpr uint32_t kGroup = abi::kv_group(kBits), kPieces = 8 / kBits;
  constexpr auto kMask = static_cast<uint8_t>((1u << kBits) - 1);
  for (uint32_t begin = 0; begin < head_dim; begin += kGroup) {
    const uint32_t bytes = std::min(head_dim - begin, kGroup) * kBits / 8;
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      for (uint32_t j = 0; j < bytes; ++j) {
        const uint32_t code = plane[j] >> (piece * kBits) & kMask;
        codes[begin + piece * bytes + j] |= static_cast<uint8_t>(code << kShift);
      }
    }
    plane += bytes;
  }
}

// One row of K.
template <uint32_t kFormat>
HWY_INLINE void PackRow(const uint8_t* codes, uint32_t head_dim, uint8_t* row) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  PackPlane<kLow, 0>(codes, head_dim, row);
  if constexpr (kHigh != 0)
    PackPlane<kHigh, kLow>(codes, head_dim, row + abi::kv_plane_bytes(head_dim, kLow));
}

template <uint32_t kFormat>
HWY_INLINE void UnpackRow(const uint8_t* row, uint32_t head_dim, uint8_t* codes) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  std::fill_n(codes, head_dim, uint8_t{0});
  UnpackPlane<kLow, 0>(row, head_dim, codes);
  if constexpr (kHigh != 0)
    UnpackPlane<kHigh, kLow>(row + abi::kv_plane_bytes(head_dim, kLow), head_dim, codes);
}

// A tile of V, one plane: kBits bytes per coordinate, byte i holds the tokens i, i + kBits, i + 2
// kBits, ... from the lowest bits up. `tokens` says which of the eight rows are new; the others
// keep their bits.
template <uint32_t kBits, uint32_t kShift>
HWY_INLINE void PackTilePlane(const uint8_t* const (&rows)[abi::kKvTile], uint32_t tokens,
                              uint32_t head_dim, uint8_t* HWY_RESTRICT plane) {
  constexpr uint32_t kPieces = 8 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint8_t keep[kBits];
  for (uint32_t i = 0; i < kBits; ++i) {
    uint32_t written = 0;
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      if ((tokens >> (i + piece * kBits) & 1) != 0) written |= kMask << (piece * kBits);
    }
    keep[i] = static_cast<uint8_t>(~written);
  }
  const DBytes d;
  // Bytes i of 16 coordinates, tokens i, i + kBits, ... put together.
  const auto gather = [&](uint32_t c, uint32_t i) HWY_ATTR {
    auto byte = hn::Zero(d);
    for (uint32_t piece = kPieces; piece-- > 0;) {
      auto code = hn::LoadU(d, rows[i + piece * kBits] + c);
      if (kShift != 0) code = hn::ShiftRight<kShift>(code);
      if (kBits != 8) byte = hn::ShiftLeft<kBits % 8>(byte);
      byte = hn::Or(byte, hn::And(code, hn::Set(d, static_cast<uint8_t>(kMask))));
    }
    return byte;
  };
  alignas(16) uint8_t fresh[16 * kBits];
  alignas(16) uint8_t pattern[16];  // kBits divides 16
  for (uint32_t j = 0; j < 16; ++j) pattern[j] = keep[j % kBits];
  const auto kept = hn::Load(d, pattern);
  for (uint32_t c = 0; c < head_dim; c += 16) {
    uint8_t* place = plane + size_t{c} * kBits;
    const uint32_t coordinates = std::min(head_dim - c, 16u);
    const bool direct = tokens == 0xFF && coordinates == 16;
    uint8_t* target = direct ? place : fresh;
    if constexpr (kBits == 1) {
      hn::StoreU(gather(c, 0), d, target);
    } else if constexpr (kBits == 2) {
      hn::StoreInterleaved2(gather(c, 0), gather(c, 1), d, target);
    } else if constexpr (kBits == 4) {
      hn::StoreInterleaved4(gather(c, 0), gather(c, 1), gather(c, 2), gather(c, 3), d, target);
    } else {
      // Eight ways: pairs of tokens as 16-bit lanes, then four ways.
      const hn::CappedTag<uint16_t, 8> d16;
      const auto pair = [&](uint32_t i, bool upper) HWY_ATTR {
        const auto a = gather(c, i), b = gather(c, i + 1);
        return hn::BitCast(d16,
                           upper ? hn::InterleaveUpper(d, a, b) : hn::InterleaveLower(d, a, b));
      };
      for (const bool upper : {false, true}) {
        hn::StoreInterleaved4(pair(0, upper), pair(2, upper), pair(4, upper), pair(6, upper), d16,
                              reinterpret_cast<uint16_t*>(target + (upper ? 64 : 0)));
      }
    }
    if (direct) continue;
    const uint32_t bytes = coordinates * kBits;
    uint32_t j = 0;
    for (; j + 16 <= bytes; j += 16) {
      const auto bitwise =
          hn::Or(hn::And(kept, hn::LoadU(d, place + j)), hn::AndNot(kept, hn::LoadU(d, fresh + j)));
      hn::StoreU(bitwise, d, place + j);
    }
    for (; j < bytes; ++j) {
      const uint8_t mask = keep[j % kBits];
      place[j] = static_cast<uint8_t>((place[j] & mask) | (fresh[j] & ~mask));
    }
  }
}

template <uint32_t kFormat>
HWY_INLINE void PackTile(const uint8_t* const (&rows)[abi::kKvTile], uint32_t tokens,
                         uint32_t head_dim, uint8_t* tile) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  PackTilePlane<kLow, 0>(rows, tokens, head_dim, tile);
  if constexpr (kHigh != 0) {
    PackTilePlane<kHigh, kLow>(rows, tokens, head_dim, tile + uint64_t{head_dim} * kLow);
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
