#pragma once
// Attention of many rows: levels of K and V as 16-bit operands. A scale has 9 bits, a level 8, an
// f16 11: scales of usual keys and values go into the operand, which rounds each product once, and
// their multiplier is 1. The others would leave the range of f16: their operand is the level times
// a power of two, exactly, and a multiplier makes up for it in scores and weights. So the bits of a
// key follow from its own scale, wherever it is unpacked.
#include "abi/kv_codec.h"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/convert.cuh"

namespace gyre::cuda {

// Operands are values times 2 to this. Scales from 2^-20 to below 2^5 have multiplier 1: values of
// 127 levels end below f16's largest, and those of the smallest scale have steps of 2^-16.
constexpr int32_t kOperandExponent = 4;
constexpr float kOperandUnit = 1.0f / (1 << kOperandExponent);

struct OperandScale {
  uint32_t f16;         // levels are multiplied by it
  uint32_t multiplier;  // as stored scales are
};
constexpr uint32_t kScaleOne = 158 << 8;  // a stored scale of 1

inline OperandScale operand_scale(uint32_t stored) {
  constexpr uint32_t kFirst = 158 - 20, kEnd = 158 + 5, kMany = 255;  // exponents
  const uint32_t exponent = stored >> 8;
  if (exponent - kFirst < kEnd - kFirst) {
    const float scale = __uint_as_float(stored << 15) * (0x1p-31f * (1 << kOperandExponent));
    return {round_f16(scale), kScaleOne};
  }
  if (exponent == 0) return {0, kScaleOne};                     // below 2^-157
  if (exponent == kMany) return {0x3C00u, stored};              // 1: infinity and NaN
  if (exponent < kFirst) return {0x0100u, stored + (20 << 8)};  // 2^-16
  return {0x5C00u, stored - (4 << 8)};                          // 2^8
}

// As to_f16x2: bytes 0 and 2, and bytes 1 and 3.
inline void to_f16x2_in_turn(uint32_t raised, uint32_t& even, uint32_t& odd) {
  even = sub_f16x2(permute(raised, 0x64646464u, 0x4240), 0x64806480u);
  odd = sub_f16x2(permute(raised, 0x64646464u, 0x4341), 0x64806480u);
}

// Eight levels as f16, in the order of keys or coordinates that every format shares: formats of
// magnitudes unpack two fours in turn.
template <uint32_t kFormat>
inline uint4 level_chunk(const Operands<1>& x) {
  constexpr bool kInTurn = abi::kv_has_magnitudes(kFormat);
  const uint32_t a = raised_levels<kFormat>(x.term[0][0]), b = raised_levels<kFormat>(x.term[0][1]);
  uint4 w;
  if constexpr (kInTurn) {
    to_f16x2_in_turn(a, w.x, w.z);
    to_f16x2_in_turn(b, w.y, w.w);
  } else {
    to_f16x2(a, w.x, w.y);
    to_f16x2(b, w.z, w.w);
  }
  return w;
}
inline uint4 scaled_chunk(const uint4& levels, const uint4& scales) {
  return make_uint4(mul_f16x2(levels.x, scales.x), mul_f16x2(levels.y, scales.y),
                    mul_f16x2(levels.z, scales.z), mul_f16x2(levels.w, scales.w));
}
// All under one scale, which `twice` has in both halves.
inline uint4 scaled_chunk(const uint4& levels, uint32_t twice) {
  return scaled_chunk(levels, make_uint4(twice, twice, twice, twice));
}

}  // namespace gyre::cuda
