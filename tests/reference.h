#pragma once
// Every op as plain scalar loops. Shares no code with the library and doubles as the specification.

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gyre/dtype.h"

namespace gyre::reference {

// A binary floating-point format. Without its sign, a larger pattern is a larger value.
struct Format {
  int mantissa_bits;
  int exponent_bits;
  uint32_t nan;  // the one NaN that narrowing writes

  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t sign() const { return 1u << (mantissa_bits + exponent_bits); }
};

inline constexpr Format kF32{23, 8, 0x7FC00000};
inline constexpr Format kF16{10, 5, 0x7E00};
inline constexpr Format kBF16{7, 8, 0x7FC0};

inline const Format& format_of(DType dtype) {
  if (dtype == DType::f16) return kF16;
  return dtype == DType::bf16 ? kBF16 : kF32;
}

// Infinity counts as the next power of two: rounding decides there as everywhere else.
inline double magnitude_of(const Format& format, uint32_t pattern) {
  const uint32_t exponent = pattern >> format.mantissa_bits;
  const uint32_t mantissa = pattern & ((1u << format.mantissa_bits) - 1);
  const uint32_t significand = mantissa + (exponent == 0 ? 0 : 1u << format.mantissa_bits);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - bias - format.mantissa_bits;
  return std::ldexp(static_cast<double>(significand), scale);
}

// The magnitude of every pattern up to infinity, in order.
inline const std::vector<double>& all_magnitudes(DType narrow) {
  static const auto list = [](DType dtype) {
    const Format& format = format_of(dtype);
    std::vector<double> magnitudes(format.infinity() + 1);
    for (uint32_t p = 0; p < magnitudes.size(); ++p) magnitudes[p] = magnitude_of(format, p);
    return magnitudes;
  };
  static const std::vector<double> f16 = list(DType::f16);
  static const std::vector<double> bf16 = list(DType::bf16);
  return narrow == DType::f16 ? f16 : bf16;
}

// Searched, not computed: the pattern whose value is nearest; of two equally near ones the even
// one.
inline uint32_t nearest_pattern(DType narrow, double magnitude) {
  const std::vector<double>& all = all_magnitudes(narrow);
  uint32_t low = 0;  // the largest pattern that is not above the magnitude
  uint32_t high = format_of(narrow).infinity();
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (all[middle] <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == format_of(narrow).infinity()) return low;
  const double to_lower = magnitude - all[low], to_upper = all[low + 1] - magnitude;
  if (to_lower != to_upper) return to_lower < to_upper ? low : low + 1;
  return low + low % 2;
}

// NaN: the narrow formats write one pattern; f16 to f32 keeps sign and payload and sets the quiet
// bit; bf16 to f32 keeps every bit. Same dtype: a copy of the bits.
inline uint32_t convert(DType from, DType to, uint32_t bits) {
  if (from == to) return bits;
  const Format& source = format_of(from);
  const Format& target = format_of(to);
  const bool negative = (bits & source.sign()) != 0;
  const uint32_t pattern = bits & (source.sign() - 1), sign = negative ? target.sign() : 0;
  if (pattern > source.infinity()) {
    if (to != DType::f32) return target.nan;
    const uint32_t mantissa = pattern & ((1u << source.mantissa_bits) - 1);
    const uint32_t quiet = from == DType::f16 ? 0x00400000u : 0;
    return sign | target.infinity() | quiet | (mantissa << (23 - source.mantissa_bits));
  }
  if (pattern == source.infinity()) return sign | target.infinity();
  const double magnitude = magnitude_of(source, pattern);
  // The builtin: std::bit_cast takes a reference, which costs the sanitizers a stack frame each
  // time.
  if (to == DType::f32) return sign | __builtin_bit_cast(uint32_t, static_cast<float>(magnitude));
  return sign | nearest_pattern(to, magnitude);
}

// Byte by byte, the lowest first.
inline uint32_t load_bits(DType dtype, const std::byte* memory, uint64_t index) {
  const uint64_t unit = size_bytes(dtype);
  uint32_t bits = 0;
  for (uint64_t b = 0; b < unit; ++b) {
    bits |= std::to_integer<uint32_t>(memory[index * unit + b]) << (8 * b);
  }
  return bits;
}

inline void store_bits(DType dtype, std::byte* memory, uint64_t index, uint32_t bits) {
  const uint64_t unit = size_bytes(dtype);
  for (uint64_t b = 0; b < unit; ++b) {
    memory[index * unit + b] = static_cast<std::byte>(bits >> (8 * b));
  }
}

// Rounds an f32 value to the dtype.
inline void store_value(DType dtype, std::byte* memory, uint64_t index, float value) {
  store_bits(dtype, memory, index, convert(DType::f32, dtype, std::bit_cast<uint32_t>(value)));
}
inline float rounded(DType dtype, float value) {
  const uint32_t bits = convert(DType::f32, dtype, std::bit_cast<uint32_t>(value));
  return std::bit_cast<float>(convert(dtype, DType::f32, bits));
}

inline double load_value(DType dtype, const std::byte* memory, uint64_t index) {
  return std::bit_cast<float>(convert(dtype, DType::f32, load_bits(dtype, memory, index)));
}

// The bytes of f32 values that are rounded to the dtype.
inline std::vector<std::byte> stored(DType dtype, std::span<const float> values) {
  std::vector<std::byte> memory(values.size() * size_bytes(dtype));
  for (uint64_t i = 0; i < values.size(); ++i) store_value(dtype, memory.data(), i, values[i]);
  return memory;
}

enum class KvLayout : uint8_t {
  token_major,  // [tokens, heads, head_dim]
  head_major,   // [heads, tokens, head_dim]
  interleaved,  // [tokens, 2, heads, head_dim]: K and V in one buffer
  padded,       // [tokens, heads, head_dim + kRowPadding]
  packed,       // [tokens, heads, K's head_dim + V's head_dim]: V behind K in every row
};

constexpr uint64_t kRowPadding = 5;

// One side of a copy: where value `e` of head `g` of token (or slot) `t` lies, in elements.
struct KvSide {
  DType dtype = DType::f32;
  KvLayout layout = KvLayout::token_major;
  uint64_t tokens = 0, heads = 0, head_dim = 0;
  uint64_t stream = 0;     // interleaved, packed: 0 is K, 1 is V
  uint64_t other_dim = 0;  // packed: head_dim of the other stream

  uint64_t index(uint64_t t, uint64_t g, uint64_t e) const {
    switch (layout) {
      case KvLayout::token_major:
        return (t * heads + g) * head_dim + e;
      case KvLayout::head_major:
        return (g * tokens + t) * head_dim + e;
      case KvLayout::interleaved:
        return ((t * 2 + stream) * heads + g) * head_dim + e;
      case KvLayout::packed:
        return (t * heads + g) * (head_dim + other_dim) + (stream == 0 ? 0 : other_dim) + e;
      case KvLayout::padded:
        break;
    }
    return (t * heads + g) * (head_dim + kRowPadding) + e;
  }
  uint64_t elements() const {
    const uint64_t rows = tokens * heads;
    if (layout == KvLayout::interleaved) return 2 * rows * head_dim;
    if (layout == KvLayout::packed) return rows * (head_dim + other_dim);
    return rows * (layout == KvLayout::padded ? head_dim + kRowPadding : head_dim);
  }
};

// One row. Values are rounded to the side's dtype.
inline void store_row(const KvSide& side, std::span<std::byte> memory, uint64_t t, uint64_t g,
                      std::span<const float> row) {
  for (uint64_t e = 0; e < row.size(); ++e)
    store_value(side.dtype, memory.data(), side.index(t, g, e), row[e]);
}
template <class Value>
std::vector<Value> load_row(const KvSide& side, std::span<const std::byte> memory, uint64_t t,
                            uint64_t g) {
  std::vector<Value> row(side.head_dim);
  for (uint64_t e = 0; e < row.size(); ++e)
    row[e] = static_cast<Value>(load_value(side.dtype, memory.data(), side.index(t, g, e)));
  return row;
}

struct KvCopyCall {
  uint64_t position = 0, source_begin = 0, tokens = 0;
};

// slot = (position + t) mod capacity, tokens in order, so the last one to reach a slot stays in it.
// A linear cache never gets past its capacity, so there the modulo changes nothing.
inline void kv_copy(const KvSide& source, const KvSide& cache, const KvCopyCall& call,
                    std::span<const std::byte> source_memory, std::span<std::byte> cache_memory) {
  for (uint64_t t = 0; t < call.tokens; ++t) {
    // position % capacity first: position + t may pass 2^64.
    const uint64_t slot = (call.position % cache.tokens + t) % cache.tokens;
    for (uint64_t g = 0; g < source.heads; ++g) {
      for (uint64_t e = 0; e < source.head_dim; ++e) {
        const uint32_t bits = load_bits(source.dtype, source_memory.data(),
                                        source.index(call.source_begin + t, g, e));
        store_bits(cache.dtype, cache_memory.data(), cache.index(slot, g, e),
                   convert(source.dtype, cache.dtype, bits));
      }
    }
  }
}

}  // namespace gyre::reference
