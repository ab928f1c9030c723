// Codes to their places in memory (src/abi/kv_codec.h says where).

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

using DCode = hn::CappedTag<uint8_t, 16>;
using VCode = hn::Vec<DCode>;

// EncodeBlock leaves codes transposed in groups of 16: where coordinate i is.
constexpr uint32_t CodePlace(uint32_t i) { return (i & ~15u) | (i & 3) << 2 | (i >> 2 & 3); }

HWY_INLINE VCode NaturalOrder(VCode bytes) {
  alignas(16) static constexpr uint8_t kNatural[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
  return hn::TableLookupBytes(bytes, hn::Load(DCode(), kNatural));
}

// A plane is bits [shift, shift + bits) of codes.
template <uint32_t kFormat, bool kHigh>
struct Plane {
  static constexpr uint32_t kBits = kHigh ? abi::kv_high_bits(kFormat) : abi::kv_low_bits(kFormat);
  static constexpr uint32_t kShift = kHigh ? abi::kv_low_bits(kFormat) : 0;
  static constexpr uint32_t kPerByte = 8 / kBits;  // codes in a byte
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  static constexpr bool kIsTop = kShift + kBits == abi::kv_bits(kFormat);
};

// 16 bytes of a plane, in natural order; load(i) gives the codes from the lowest bits up.
template <class P, class Load>
HWY_INLINE VCode JoinFields(const Load& load) {
  const auto field = [&](uint32_t i) HWY_ATTR {
    VCode code = load(i);
    if constexpr (P::kShift != 0) code = hn::ShiftRight<P::kShift>(code);
    if constexpr (!P::kIsTop) code = hn::And(code, hn::Set(DCode(), uint8_t{P::kMask}));
    return code;
  };
  VCode bytes = field(P::kPerByte - 1);
  for (uint32_t i = P::kPerByte - 1; i-- > 0;) {
    bytes = hn::Or(hn::ShiftLeft<P::kBits % 8>(bytes), field(i));
  }
  return NaturalOrder(bytes);
}

// One plane of a row of K.
template <class P>
HWY_INLINE void PackPlane(const uint8_t* HWY_RESTRICT codes, uint32_t head_dim,
                          uint8_t* HWY_RESTRICT plane) {
  constexpr uint32_t kGroup = abi::kv_group(P::kBits);
  const DCode d;
  uint32_t begin = 0;
  for (; begin + kGroup <= head_dim; begin += kGroup, plane += 16) {
    const auto load = [&](uint32_t field)
                          HWY_ATTR { return hn::LoadU(d, codes + begin + size_t{16} * field); };
    hn::StoreU(JoinFields<P>(load), d, plane);
  }
  const uint32_t remainder = (head_dim - begin) * P::kBits / 8;
  for (uint32_t j = 0; j < remainder; ++j) {
    uint32_t byte = 0;
    for (uint32_t field = 0; field < P::kPerByte; ++field) {
      const uint32_t code = codes[CodePlace(begin + field * remainder + j)];
      byte |= (code >> P::kShift & P::kMask) << (field * P::kBits);
    }
    plane[j] = static_cast<uint8_t>(byte);
  }
}

// One row of K.
template <uint32_t kFormat>
HWY_INLINE void PackRow(const uint8_t* codes, uint32_t head_dim, uint8_t* row) {
  using Low = Plane<kFormat, false>;
  PackPlane<Low>(codes, head_dim, row);
  if constexpr (!Low::kIsTop) {
    PackPlane<Plane<kFormat, true>>(codes, head_dim,
                                    row + abi::kv_plane_bytes(head_dim, Low::kBits));
  }
}

// A tile of V, one plane: kBits bytes per coordinate, byte i holds the tokens i, i + kBits, i + 2
// kBits, ... from the lowest bits up. `tokens` says which of the eight rows are new; the others
// keep their bits.
template <class P>
HWY_INLINE void PackTilePlane(const uint8_t* const (&rows)[abi::kKvTile], uint32_t tokens,
                              uint32_t head_dim, uint8_t* HWY_RESTRICT plane) {
  constexpr uint32_t kBits = P::kBits;
  uint8_t unwritten[kBits];
  for (uint32_t i = 0; i < kBits; ++i) {
    uint32_t written = 0;
    for (uint32_t field = 0; field < P::kPerByte; ++field) {
      if ((tokens >> (i + field * kBits) & 1) != 0) written |= P::kMask << (field * kBits);
    }
    unwritten[i] = static_cast<uint8_t>(~written);
  }
  const DCode d;
  // Bytes i of 16 coordinates: tokens i, i + kBits, ...
  const auto gather = [&](uint32_t c, uint32_t i) HWY_ATTR {
    return JoinFields<P>([&](uint32_t field)
                             HWY_ATTR { return hn::LoadU(d, rows[i + field * kBits] + c); });
  };
  alignas(16) uint8_t fresh[16 * kBits];
  alignas(16) uint8_t pattern[16];  // kBits divides 16
  for (uint32_t j = 0; j < 16; ++j) pattern[j] = unwritten[j % kBits];
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
      // Interleaves by eight: pairs of tokens as 16-bit lanes, then these by four.
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
      const uint8_t mask = unwritten[j % kBits];
      place[j] = static_cast<uint8_t>((place[j] & mask) | (fresh[j] & ~mask));
    }
  }
}

template <uint32_t kFormat>
HWY_INLINE void PackTile(const uint8_t* const (&rows)[abi::kKvTile], uint32_t tokens,
                         uint32_t head_dim, uint8_t* tile) {
  using Low = Plane<kFormat, false>;
  PackTilePlane<Low>(rows, tokens, head_dim, tile);
  if constexpr (!Low::kIsTop) {
    PackTilePlane<Plane<kFormat, true>>(rows, tokens, head_dim,
                                        tile + uint64_t{head_dim} * Low::kBits);
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
