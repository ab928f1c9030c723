#pragma once
// Operands of wgmma over int8 (wgmma_s8_instructions.cuh).
#include "abi/types.h"

namespace gyre::cuda {

// Byte of an operand in rows of 64 or 128 bytes: chunks of 16 bytes, XOR swizzle. What wgmma reads
// begins at a multiple of 1024 bytes.
template <uint32_t kRowBytes>
constexpr uint32_t swizzled_byte(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  const uint32_t by = kRowBytes == 128 ? row & 7 : row / 2 & 3;
  return row * kRowBytes + (chunk ^ by) * 16;
}

}  // namespace gyre::cuda
