#pragma once
// What NEON's two unpackers share, unpack_neon_k.h and unpack_neon_v.h: codes of up to four bits
// become levels through a 16-byte table.

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "abi/kv_codec.h"

namespace gyre::cpu {
namespace {

// Whether operands are codes in place of levels: a level is 2 code - kCodeBias then, and whoever
// multiplies corrects the sum.
template <uint32_t kFormat>
inline constexpr bool kLinearCodes = abi::kv_is_native(kFormat) && abi::kv_codec(kFormat).levels
                                                                       == abi::KvLevels::odd;
template <uint32_t kFormat>
inline constexpr int32_t kCodeBias = kLinearCodes<kFormat> ? (1 << abi::kv_codec(kFormat).bits) - 1
                                                           : 0;

// Operands as levels.
template <uint32_t kFormat>
inline int8x16_t level_of(int8x16_t operand) {
  if constexpr (!kLinearCodes<kFormat>) return operand;
  return vsubq_s8(vaddq_s8(operand, operand), vdupq_n_s8(kCodeBias<kFormat>));
}

// A sum of products with operands becomes one with levels. `bias` is kCodeBias times the sum of
// the factors.
template <uint32_t kFormat>
inline int32x4_t level_sum(int32x4_t sum, int32_t bias) {
  if constexpr (!kLinearCodes<kFormat>) return sum;
  return vsubq_s32(vshlq_n_s32(sum, 1), vdupq_n_s32(bias));
}

struct LevelTable {
  int8_t at[16];
};

// At compile time: a function shared with other files must not be compiled here.
template <class At>
constexpr LevelTable make_table() {
  LevelTable table{};
  for (uint32_t i = 0; i < 16; ++i) table.at[i] = static_cast<int8_t>(At{}(i));
  return table;
}

template <class At>
inline int8x16_t load_table(const At& /*at*/) {
  alignas(16) static constexpr LevelTable kTable = make_table<At>();
  return vld1q_s8(kTable.at);
}

inline int8x16_t look_up(int8x16_t table, uint8x16_t index) { return vqtbl1q_s8(table, index); }

inline int8x16_t as_signed(uint8x16_t v) { return vreinterpretq_s8_u8(v); }

// Two-bit fields: each of the two in a nibble is looked up by the whole nibble, which spares
// isolating it.
template <uint32_t kFormat>
struct FieldTables {
  // tq3: magnitudes, the sign comes from the high plane.
  static constexpr int32_t level(uint32_t field) { return abi::kv_level(kFormat, field); }
  int8x16_t even = load_table([](uint32_t i) { return level(i & 3); });
  int8x16_t odd = load_table([](uint32_t i) { return level(i >> 2); });
};

// tq3: the sign goes into bit 4 of the index: the second table has the negative levels.
template <uint32_t kFormat>
struct SignedFieldTables : FieldTables<kFormat> {
  int8x16x2_t both_even{{this->even, vnegq_s8(this->even)}};
  int8x16x2_t both_odd{{this->odd, vnegq_s8(this->odd)}};
};

template <uint32_t kFormat>
struct NibbleTables {
  int8x16_t level = load_table([](uint32_t i) { return abi::kv_level(kFormat, i); });
};

inline uint8x16_t low_nibbles(uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }

}  // namespace
}  // namespace gyre::cpu
