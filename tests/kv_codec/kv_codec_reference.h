#pragma once
// The native KV formats as plain scalar code, written from docs/kv_formats.md. Shares no code with
// the library; the order of every f32 operation is part of the format, so programs that include
// this must be built without contraction.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gyre::reference {

// What a native format is made of; keys and values differ in the scale.
struct KvCoder {
  uint32_t bits = 4;
  uint32_t low_bits = 4;        // of the first plane; the rest are the second
  std::vector<int> magnitudes;  // none: integers, odd ones below 8 bits
  double best_factor = 0;       // magnitudes times this fit N(0,1) best
  double error = 0;             // that they then have; of integers nobody asks
  bool values = false;

  float top() const { return bits == 8 ? 127.0f : static_cast<float>(1 << (bits - 1)); }
  // From the scale that keeps the length to the one that is stored.
  float stretch() const { return values ? static_cast<float>(1 / std::sqrt(1 - error)) : 1.0f; }
};

inline KvCoder kv_coder(std::string_view format, bool values = false) {
  if (format == "tq2") return {2, 2, {36, 120}, 0.01258624817301284, 0.117481911838059115, values};
  if (format == "tq3")
    return {3, 2, {10, 31, 55, 88}, 0.0244461383835827, 0.0345485776769533953, values};
  if (format == "tq4")
    return {4,     4, {5, 15, 25, 37, 49, 63, 81, 107}, 0.025559356256893873, 0.00953290924499739,
            values};
  if (format == "tq5") return {5, 4, {}, 0, 0, values};
  if (format == "tq6") return {6, 4, {}, 0, 0, values};
  if (format == "tq8") return {8, 8, {}, 0, 0, values};
  throw std::invalid_argument("no reference for the format " + std::string(format));
}

inline bool kv_flips(uint32_t coordinate) {
  uint32_t mix = coordinate + 0x26F7u;
  mix = (mix ^ mix / 65536) * 0x85EBCA6Bu;
  mix = (mix ^ mix / 8192) * 0xC2B2AE35u;
  mix ^= mix / 65536;
  return mix >= 0x80000000u;
}

struct KvSpan {
  uint32_t begin = 0, size = 0;
};

inline std::vector<KvSpan> kv_transform_spans(uint32_t head_dim) {
  std::vector<KvSpan> spans;
  uint32_t begin = 0;
  while (begin < head_dim) {
    const uint32_t size = std::bit_floor(head_dim - begin);
    spans.push_back({begin, size});
    begin += size;
  }
  return spans;
}

inline std::vector<KvSpan> kv_scale_spans(uint32_t head_dim) {
  std::vector<KvSpan> spans;
  for (const KvSpan block : kv_transform_spans(head_dim)) {
    const uint32_t size = std::min(block.size, 256u);
    for (uint32_t at = 0; at < block.size; at += size) spans.push_back({block.begin + at, size});
  }
  return spans;
}

template <class T>
void butterfly_stage(std::span<T> y, size_t step) {
  for (size_t j = 0; j < y.size(); ++j) {
    if ((j & step) != 0) continue;
    const T a = y[j], b = y[j + step];
    y[j] = a + b;
    y[j + step] = a - b;
  }
}

// Without the factor 1 / sqrt(n).
template <class T>
void walsh_hadamard(std::span<T> y) {
  for (size_t step = 4; step < y.size(); step *= 2) butterfly_stage(y, step);
  for (const size_t step : {size_t{1}, size_t{2}}) {
    if (step < y.size()) butterfly_stage(y, step);
  }
}

inline float kv_sum_of_squares(std::span<const float> block) {
  std::vector<float> y(block.begin(), block.end());
  if (y.size() < 16) y.resize(16, 0.0f);
  const size_t quarter = std::max<size_t>(y.size() / 4, 16);
  float total[4][4] = {};
  for (size_t group = 0; group < y.size(); group += 16) {
    for (size_t lane = 0; lane < 4; ++lane) {
      const float* at = &y[group + 4 * lane];
      const float even = at[0] * at[0] + at[2] * at[2], odd = at[1] * at[1] + at[3] * at[3];
      total[group / quarter][lane] += even + odd;
    }
  }
  float lanes[4];
  for (size_t l = 0; l < 4; ++l)
    lanes[l] = (total[0][l] + total[2][l]) + (total[1][l] + total[3][l]);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// value * 2^exponent with 8 bits of exponent (bias 158) and 8 of mantissa, found by division
// instead of shifts.
inline uint16_t kv_scale_pattern(float value, int exponent) {
  if (value == 0) return 0;
  const double scaled = std::ldexp(static_cast<double>(value), exponent + 31);
  if (scaled >= 0x1p128) return 0xFF00;
  const int power = std::max(std::ilogb(scaled), -126);
  const double steps = std::nearbyint(std::ldexp(scaled, 8 - power));  // ties to even
  return static_cast<uint16_t>((power + 126) * 256 + static_cast<int>(steps));
}

inline double kv_scale_value(uint16_t pattern) {
  const int exponent = pattern >> 8;
  const int mantissa = pattern & 255;
  if (exponent == 255) {
    return mantissa == 0 ? std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return std::ldexp(mantissa, -157 - 8);
  return std::ldexp(256 + mantissa, exponent - 158 - 8);
}

inline int kv_level_of(const KvCoder& coder, uint32_t code) {
  if (coder.bits == 8) return code < 128 ? static_cast<int>(code) : static_cast<int>(code) - 256;
  const int half = 1 << (coder.bits - 1);
  const int value = static_cast<int>(code);
  if (coder.magnitudes.empty()) return 2 * value + 1 - 2 * half;
  return value < half ? coder.magnitudes[value] : -coder.magnitudes[value - half];
}

inline uint32_t kv_zero_code(const KvCoder& coder) {
  return coder.magnitudes.empty() && coder.bits != 8 ? 1u << (coder.bits - 1) : 0;
}

inline uint32_t kv_code_of(const KvCoder& coder, float y, float factor) {
  if (coder.magnitudes.empty()) {
    const float v = y * factor;
    const auto top = static_cast<int>(coder.top());
    if (coder.bits == 8) return std::clamp(static_cast<int>(std::ceil(v - 0.5f)), -top, top) & 255;
    return static_cast<uint32_t>(std::clamp(static_cast<int>(std::ceil(v)), 1 - top, top) + top -
                                 1);
  }
  const float doubled = std::ceil(std::fabs(y) * factor);
  uint32_t index = 0;
  while (index + 1 < coder.magnitudes.size() &&
         doubled > static_cast<float>(coder.magnitudes[index] + coder.magnitudes[index + 1])) {
    ++index;
  }
  return index + (std::signbit(y) ? 1u << (coder.bits - 1) : 0);
}

// One head of one token.
struct KvCodes {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
};

// A scale block that is in range; `points` is the size of its transform.
inline void kv_code_block(const KvCoder& coder, std::span<const float> y, size_t points,
                          int exponent, KvCodes& out) {
  const float sum = kv_sum_of_squares(y);
  if (sum == 0) {
    out.codes.insert(out.codes.end(), y.size(), static_cast<uint8_t>(kv_zero_code(coder)));
    out.scales.push_back(0);
    return;
  }
  float factor = 0;
  if (!coder.magnitudes.empty()) {
    const auto gain = static_cast<float>(2 / coder.best_factor);
    factor = gain / std::sqrt(sum / static_cast<float>(y.size()));
  } else {
    float largest = 0;
    for (const float v : y) largest = std::max(largest, std::fabs(v));
    factor = coder.top() / largest;
  }
  int squares = 0;
  for (const float v : y) {
    const uint32_t code = kv_code_of(coder, v, factor);
    squares += kv_level_of(coder, code) * kv_level_of(coder, code);
    out.codes.push_back(static_cast<uint8_t>(code));
  }
  const float energy = sum / static_cast<float>(points);
  const float kept_length = std::sqrt(energy / static_cast<float>(squares));
  out.scales.push_back(kv_scale_pattern(kept_length * coder.stretch(), exponent));
}

inline bool kv_in_range(std::span<const float> y) {
  float sum = 0;
  const size_t part = std::min<size_t>(y.size(), 256);
  for (size_t at = 0; at < y.size(); at += part) sum += kv_sum_of_squares(y.subspan(at, part));
  return sum >= 0x1p-80f && sum <= 0x1p120f;
}

// A transform block of a row in which some block is out of range. x: with signs applied.
inline void kv_code_extreme(const KvCoder& coder, std::vector<float> x, KvCodes& out) {
  const size_t part = std::min<size_t>(x.size(), 256);
  float largest = 0;
  bool finite = true;
  for (const float v : x) {
    finite = finite && std::isfinite(v);
    largest = std::max(largest, std::fabs(v));
  }
  if (!finite || largest == 0) {
    out.codes.insert(out.codes.end(), x.size(), static_cast<uint8_t>(kv_zero_code(coder)));
    out.scales.insert(out.scales.end(), x.size() / part, finite ? uint16_t{0} : uint16_t{0xFFC0});
    return;
  }
  const int exponent = largest >= 0x1p-30f && largest <= 0x1p30f ? 0 : std::ilogb(largest);
  for (float& v : x) v = std::ldexp(v, -exponent);
  walsh_hadamard<float>(x);
  for (size_t at = 0; at < x.size(); at += part) {
    kv_code_block(coder, std::span<const float>(x).subspan(at, part), x.size(), exponent, out);
  }
}

inline KvCodes kv_feedback(const KvCoder& coder, std::span<const float> row) {
  std::vector<std::vector<float>> blocks, rotated;
  bool in_range = true;
  for (const KvSpan span : kv_transform_spans(static_cast<uint32_t>(row.size()))) {
    std::vector<float> x(row.begin() + span.begin, row.begin() + span.begin + span.size);
    for (uint32_t j = 0; j < span.size; ++j) x[j] = kv_flips(span.begin + j) ? -x[j] : x[j];
    blocks.push_back(x);
    walsh_hadamard<float>(x);
    in_range = in_range && kv_in_range(x);
    rotated.push_back(x);
  }
  KvCodes out;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (!in_range) {
      kv_code_extreme(coder, blocks[b], out);
      continue;
    }
    const size_t part = std::min<size_t>(rotated[b].size(), 256);
    for (size_t at = 0; at < rotated[b].size(); at += part) {
      kv_code_block(coder, std::span<const float>(rotated[b]).subspan(at, part), rotated[b].size(),
                    0, out);
    }
  }
  return out;
}

// Where bit `bit` of a code lies, counted from the start of a head's codes.
struct KvBitPlace {
  uint64_t byte = 0;
  uint32_t shift = 0;
};

// rows: K, a slot's row after the other; otherwise V in tiles of 8 slots.
struct KvPlaces {
  KvCoder coder;
  uint64_t head_dim = 0, capacity = 0;
  bool rows = true;

  uint64_t tiles() const { return (capacity + 7) / 8; }
  uint64_t scale_blocks() const { return kv_scale_spans(static_cast<uint32_t>(head_dim)).size(); }
  uint64_t head_bytes() const { return tiles() * head_dim * coder.bits; }
  uint64_t scale_head_bytes() const { return tiles() * scale_blocks() * 16; }

  KvBitPlace bit(uint64_t slot, uint64_t coordinate, uint32_t bit) const {
    const bool high = bit >= coder.low_bits;
    const uint64_t width = high ? coder.bits - coder.low_bits : coder.low_bits;
    const uint64_t within = high ? bit - coder.low_bits : bit;
    if (!rows) {
      const uint64_t tile = slot / 8 * head_dim * coder.bits;
      const uint64_t plane = high ? head_dim * coder.low_bits : 0, token = slot % 8;
      return {tile + plane + coordinate * width + token % width,
              static_cast<uint32_t>(token / width * width + within)};
    }
    const uint64_t row = slot * head_dim * coder.bits / 8;
    const uint64_t plane = high ? head_dim * coder.low_bits / 8 : 0, group = 128 / width;
    const uint64_t begin = coordinate / group * group;
    const uint64_t bytes = std::min(head_dim - begin, group) * width / 8;
    const uint64_t inside = coordinate - begin;
    return {row + plane + begin * width / 8 + inside % bytes,
            static_cast<uint32_t>(inside / bytes * width + within)};
  }

  uint64_t scale_byte(uint64_t slot, uint64_t block) const {
    return ((slot / 8 * scale_blocks() + block) * 8 + slot % 8) * 2;
  }
};

inline void kv_store(const KvPlaces& at, uint64_t slot, const KvCodes& row, std::byte* codes,
                     std::byte* scales) {
  for (uint64_t c = 0; c < at.head_dim; ++c) {
    for (uint32_t b = 0; b < at.coder.bits; ++b) {
      const KvBitPlace place = at.bit(slot, c, b);
      const auto mask = static_cast<std::byte>(1u << place.shift);
      if ((row.codes[c] >> b & 1) != 0) {
        codes[place.byte] |= mask;
      } else {
        codes[place.byte] &= ~mask;
      }
    }
  }
  for (uint64_t i = 0; i < row.scales.size(); ++i) {
    scales[at.scale_byte(slot, i)] = static_cast<std::byte>(row.scales[i] & 255);
    scales[at.scale_byte(slot, i) + 1] = static_cast<std::byte>(row.scales[i] >> 8);
  }
}

inline KvCodes kv_load(const KvPlaces& at, uint64_t slot, const std::byte* codes,
                       const std::byte* scales) {
  KvCodes row;
  for (uint64_t c = 0; c < at.head_dim; ++c) {
    uint32_t code = 0;
    for (uint32_t b = 0; b < at.coder.bits; ++b) {
      const KvBitPlace place = at.bit(slot, c, b);
      code |= (static_cast<uint32_t>(codes[place.byte]) >> place.shift & 1) << b;
    }
    row.codes.push_back(static_cast<uint8_t>(code));
  }
  for (uint64_t i = 0; i < at.scale_blocks(); ++i) {
    const auto low = static_cast<uint32_t>(scales[at.scale_byte(slot, i)]);
    const auto high = static_cast<uint32_t>(scales[at.scale_byte(slot, i) + 1]);
    row.scales.push_back(static_cast<uint16_t>(low | high << 8));
  }
  return row;
}

// Levels times scales, still rotated.
inline std::vector<double> kv_rotated(const KvCoder& coder, const KvCodes& row) {
  std::vector<double> y;
  const auto spans = kv_scale_spans(static_cast<uint32_t>(row.codes.size()));
  for (size_t i = 0; i < spans.size(); ++i) {
    for (uint32_t j = 0; j < spans[i].size; ++j) {
      y.push_back(kv_level_of(coder, row.codes[spans[i].begin + j]) *
                  kv_scale_value(row.scales[i]));
    }
  }
  return y;
}

// Every transform block back, with the signs.
inline std::vector<double> kv_restored(std::vector<double> y) {
  for (const KvSpan span : kv_transform_spans(static_cast<uint32_t>(y.size()))) {
    const auto block = std::span<double>(y).subspan(span.begin, span.size);
    walsh_hadamard(block);
    for (double& v : block) v /= std::sqrt(static_cast<double>(span.size));
  }
  for (uint32_t j = 0; j < y.size(); ++j) y[j] = kv_flips(j) ? -y[j] : y[j];
  return y;
}

}  // namespace gyre::reference
