#pragma once
// From stored bytes to a row of rotated coordinates in registers.
#include "abi/kv_codec.h"
#include "abi/kv_layout.h"
#include "cuda/kernels/encode.cuh"
#include "cuda/kernels/mlx_native.cuh"

namespace gyre::cuda {

struct StoredRow {
  const uint8_t* codes;   // of the tile
  const uint8_t* scales;  // of the tile
  uint32_t slot;
};

template <uint32_t kFormat>
__device__ void load_codes(const abi::KvCacheLayout& cache, const StoredRow& row, uint32_t begin,
                           uint32_t (&codes)[kChunk]) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const bool tiled = cache.role == 1;
  const uint8_t* const k_row = row.codes + row.slot * (cache.codes_tile_stride / abi::kKvTile);
  if (tiled) {
    value_plane_codes<kLow>(row.codes, row.slot, begin, codes);
  } else {
    key_plane_codes<kLow>(k_row, cache.head_dim, begin, codes);
  }
  if constexpr (kHigh != 0) {
    uint32_t high[kChunk];
    if (tiled) {
      value_plane_codes<kHigh>(row.codes + cache.head_dim * kLow, row.slot, begin, high);
    } else {
      key_plane_codes<kHigh>(k_row + abi::kv_plane_bytes(cache.head_dim, kLow), cache.head_dim,
                             begin, high);
    }
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) codes[i] |= high[i] << kLow;
  }
}

// The product of a scale and its bias, 2^-31, is exact unless it is subnormal; then the bias comes
// off last.
template <uint32_t kFormat, uint32_t kSlots>
__device__ void decode_row(const abi::KvCacheLayout& cache, const RowPlace<kSlots>& at,
                           const StoredRow& row, float (&y)[kSlots][kChunk]) {
  if constexpr (abi::kv_is_mlx_native(kFormat)) {
    mlx_native_decode(kFormat, cache, at,
                      row.codes + row.slot * (cache.codes_tile_stride / abi::kKvTile),
                      reinterpret_cast<const float*>(
                          row.scales + row.slot * (cache.scales_tile_stride / abi::kKvTile)),
                      y);
  } else {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      if (!at.active(s)) continue;
      uint32_t codes[kChunk];
      load_codes<kFormat>(cache, row, at.begin(s), codes);
      const uint8_t* const scale_at =
          row.scales +
          2 * (scale_index(at.head_dim, at.size[s], at.begin(s)) * abi::kKvTile + row.slot);
      const uint32_t stored = scale_at[0] | static_cast<uint32_t>(scale_at[1]) << 8;
      const float raw = __uint_as_float(stored << 15);
      const bool tiny = raw * 0x1p-31f < 0x1p-126f;
      const float scale = tiny ? raw : raw * 0x1p-31f, step = tiny ? 0x1p-31f : 1.0f;
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i)
        y[s][i] = static_cast<float>(level_of<kFormat>(codes[i])) * scale * step;
    }
  }
}

}  // namespace gyre::cuda
