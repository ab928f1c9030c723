#pragma once

#include <cstdint>

namespace gyre::cpu {

// Codes, one byte each, and f32 norms of one head, as mlx-native makes them. head_dim is
// a power of two.
void encode_compat(uint32_t format, const float* x, uint32_t head_dim, uint8_t* codes,
                   float* norms);

// Rotated coordinates.
void decode_compat(uint32_t format, const uint8_t* codes, const float* norms, uint32_t head_dim,
                   float* y);

// Whether the format flips signs before its transform.
bool compat_is_signed(uint32_t format, uint32_t head_dim);

}  // namespace gyre::cpu
