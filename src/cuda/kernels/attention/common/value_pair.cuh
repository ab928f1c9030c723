#pragma once
// Values in shared memory, as they are stored.
#include "abi/kv_codec.h"

namespace gyre::cuda {

// Words of two coordinates of a tile, as unpack_values takes them.
template <uint32_t kV>
struct ValuePair {
  static constexpr uint32_t kLow = abi::kv_low_bits(kV), kHigh = abi::kv_high_bits(kV);
  uint32_t low[kLow / 2], high = 0;

  ValuePair() = default;
  ValuePair(const uint8_t* tile, uint32_t n, uint32_t a, uint32_t b) {
    if constexpr (kLow == 8) {
      const auto* const words = reinterpret_cast<const uint2*>(tile);
      low[0] = words[a].x, low[1] = words[a].y, low[2] = words[b].x, low[3] = words[b].y;
    } else if constexpr (kLow == 4) {
      const auto* const words = reinterpret_cast<const uint32_t*>(tile);
      low[0] = words[a], low[1] = words[b];
    } else {
      const auto* const words = reinterpret_cast<const uint16_t*>(tile);
      low[0] = words[a] | static_cast<uint32_t>(words[b]) << 16;
    }
    const uint8_t* const plane = tile + n * kLow;
    if constexpr (kHigh == 2) {
      const auto* const words = reinterpret_cast<const uint16_t*>(plane);
      high = words[a] | static_cast<uint32_t>(words[b]) << 16;
    } else if constexpr (kHigh == 1) {
      high = plane[a] | static_cast<uint32_t>(plane[b]) << 8;
    }
  }
};

// Whether one of two 16-bit floats is infinite or NaN.
inline bool not_finite(uint32_t pair, uint32_t exponent) {
  return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
}

}  // namespace gyre::cuda
