#pragma once

#include <cstdint>

#include "abi/kv_layout.h"

namespace gyre::cpu {

// Codes, one byte each, and f32 norms of one head, as mlx-native makes them. head_dim is
// a power of two.
void encode_mlx_native(const abi::KvCacheLayout& cache, const float* x, uint8_t* codes,
                       float* norms);

// Rotated coordinates.
void decode_mlx_native(const abi::KvCacheLayout& cache, const uint8_t* codes, const float* norms,
                       float* y);

// Whether the format flips signs before its transform.
bool mlx_native_is_signed(uint32_t format, uint32_t head_dim);

}  // namespace gyre::cpu
