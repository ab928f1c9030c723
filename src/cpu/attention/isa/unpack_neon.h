#pragma once
// What NEON's two unpackers share, unpack_neon_k.h and unpack_neon_v.h: codes of up to four bits
// become levels through a 16-byte table.

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "abi/kv_codec.h"

namespace gyre::cpu {
namespace {

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

// Negates magnitudes where the mask is all ones.
inline int8x16_t negate_where(int8x16_t magnitude, uint8x16_t mask) {
  const int8x16_t m = vreinterpretq_s8_u8(mask);
  return vsubq_s8(veorq_s8(magnitude, m), m);
}

// Two-bit fields: each of the two in a nibble is looked up by the whole nibble, which spares
// isolating it.
template <uint32_t kFormat>
struct FieldTables {
  // tq3: magnitudes, the sign comes from the high plane.
  static constexpr int32_t level(uint32_t field) { return abi::kv_level(kFormat, field); }
  int8x16_t even = load_table([](uint32_t i) { return level(i & 3); });
  int8x16_t odd = load_table([](uint32_t i) { return level(i >> 2); });
};

template <uint32_t kFormat>
struct NibbleTables {
  int8x16_t level = load_table([](uint32_t i) { return abi::kv_level(kFormat, i); });
};

inline uint8x16_t low_nibbles(uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); }

}  // namespace
}  // namespace gyre::cpu
