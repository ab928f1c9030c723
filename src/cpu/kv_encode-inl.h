// From a head's coordinates to codes and scales (native formats). The steps and their order are docs/kv_formats.md's.

#if defined(GYRE_CPU_KV_ENCODE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_ENCODE_INL_H
#undef GYRE_CPU_KV_ENCODE_INL_H
#else
#define GYRE_CPU_KV_ENCODE_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "abi/kv_codec.h"
#include "cpu/convert-inl.h"
#include "cpu/hadamard-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Codes of one row, one byte each, and its scales.
struct KvRow {
  alignas(64) uint8_t codes[abi::kKvMaxHeadDim + 64];
  uint16_t scales[abi::kKvMaxScales];
};

// Sixteen partial sums, lane j over y[j], y[j + 16], ...; then halves onto halves. Product and sum are rounded apart.
HWY_INLINE float SumOfSquaresFixed(const float* HWY_RESTRICT y, uint32_t n) {
  const DHadamard d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  alignas(64) float partial[16] = {};
  const uint32_t width = std::min(n, 16u);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (uint32_t i = 0; i < n; i += 16) {
    const auto square = [&](uint32_t at) HWY_ATTR {
      const auto v = hn::LoadU(d, y + i + at);
      return hn::Mul(v, v);
    };
    s0 = hn::Add(s0, square(0));
    if (lanes < width) s1 = hn::Add(s1, square(lanes));
    if (2 * lanes < width) s2 = hn::Add(s2, square(2 * lanes));
    if (3 * lanes < width) s3 = hn::Add(s3, square(3 * lanes));
  }
  hn::StoreU(s0, d, partial);
  if (lanes < width) hn::StoreU(s1, d, partial + lanes);
  if (2 * lanes < width) hn::StoreU(s2, d, partial + 2 * lanes);
  if (3 * lanes < width) hn::StoreU(s3, d, partial + 3 * lanes);
  for (uint32_t half = 8; half != 0; half /= 2) {
    for (uint32_t j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return partial[0];
}

HWY_INLINE float LargestMagnitude(const float* HWY_RESTRICT y, uint32_t n) {
  const DHadamard d;
  auto largest = hn::Zero(d);
  for (uint32_t i = 0; i < n; i += static_cast<uint32_t>(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::Abs(hn::LoadU(d, y + i)));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// value * 2^exponent as a 16-bit scale, nearest, ties to even. Two steps, so that neither factor leaves the range.
inline uint16_t EncodeScale(float value, int exponent) {
  const int shifted = exponent + 31;
  const float scaled = std::ldexp(value, shifted);  // rounds only where the result is subnormal
  const auto bits = std::bit_cast<uint32_t>(scaled);
  if (bits >= 0x7F800000u) return abi::kKvScaleInfinity;
  return static_cast<uint16_t>((bits + 0x3FFFu + (bits >> 15 & 1u)) >> 15);
}

// Four vectors of f32 -> ceil, clamped to [low, high], as bytes in order.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreCeilBytes(D d, V v, int32_t low, int32_t high, int8_t* to) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<int16_t, D> d16;
  const hn::Rebind<int8_t, D> d8;
  const auto whole = hn::ConvertTo(di, hn::Ceil(v));
  const auto clamped = hn::Min(hn::Max(whole, hn::Set(di, low)), hn::Set(di, high));
  hn::StoreU(hn::DemoteTo(d8, hn::DemoteTo(d16, clamped)), d8, to);
}

// 2 to 4 bits: sign and index of the nearest magnitude, a tie to the smaller one. Returns the sum of squared levels.
template <uint32_t kMagnitudes>
HWY_INLINE uint32_t EncodeLevels(const float* HWY_RESTRICT y, uint32_t n, float inverse,
                                 const uint8_t (&levels)[kMagnitudes],
                                 const uint8_t (&thresholds)[kMagnitudes - 1], uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const hn::Rebind<uint8_t, decltype(d)> du8;
  const auto factor = hn::Set(d, inverse);
  alignas(64) uint8_t doubled[abi::kKvScaleBlock + 16];  // ceil(2 |v|), at most 255
  for (uint32_t i = 0; i < n; i += static_cast<uint32_t>(hn::Lanes(d))) {
    const auto v = hn::Mul(hn::Abs(hn::LoadU(d, y + i)), factor);
    // Saturating twice: i32 -> i16 -> u8.
    const auto whole = hn::ConvertTo(di, hn::Ceil(hn::Min(v, hn::Set(d, 255.0f))));
    hn::StoreU(hn::DemoteTo(du8, hn::DemoteTo(d16, whole)), du8, doubled + i);
  }
  constexpr uint32_t kSign = kMagnitudes;  // the bit above the magnitude's
  uint32_t squares = 0;
  const hn::CappedTag<uint8_t, 16> db;
  const auto width = static_cast<uint32_t>(hn::Lanes(db));
  uint32_t i = 0;
  alignas(16) uint8_t padded[16] = {};
  std::copy_n(levels, kMagnitudes, padded);
  for (; i + width <= n; i += width) {
    const auto a = hn::Load(db, doubled + i);
    auto index = hn::Zero(db);
    for (const uint8_t threshold : thresholds) {
      index = hn::Sub(index, hn::VecFromMask(db, hn::Gt(a, hn::Set(db, threshold))));
    }
    hn::StoreU(index, db, codes + i);
  }
  for (; i < n; ++i) {
    uint8_t index = 0;
    for (const uint8_t threshold : thresholds) index += doubled[i] > threshold ? 1 : 0;
    codes[i] = index;
  }
  for (i = 0; i < n; ++i) {
    const uint32_t level = padded[codes[i]];
    squares += level * level;
    codes[i] |= std::bit_cast<uint32_t>(y[i]) >> 31 != 0 ? kSign : 0;
  }
  return squares;
}

// 5, 6 and 8 bits: the nearest integer (odd ones below 8 bits), a tie to the lower one.
template <uint32_t kBits>
HWY_INLINE uint32_t EncodeIntegers(const float* HWY_RESTRICT y, uint32_t n, float inverse,
                                   uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  constexpr int32_t kTop = kBits == 8 ? 127 : (1 << (kBits - 1));
  const auto factor = hn::Set(d, inverse);
  auto* bytes = reinterpret_cast<int8_t*>(codes);
  for (uint32_t i = 0; i < n; i += static_cast<uint32_t>(hn::Lanes(d))) {
    auto v = hn::Mul(hn::LoadU(d, y + i), factor);
    if (kBits == 8) v = hn::Sub(v, hn::Set(d, 0.5f));
    StoreCeilBytes(d, v, kBits == 8 ? -kTop : 1 - kTop, kTop, bytes + i);
  }
  uint32_t squares = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const int32_t level = kBits == 8 ? bytes[i] : 2 * bytes[i] - 1;
    squares += static_cast<uint32_t>(level * level);
    if (kBits != 8) codes[i] = static_cast<uint8_t>(bytes[i] + kTop - 1);
  }
  return squares;
}

// One scale block of n coordinates y, unnormalised from a transform of `transform` points, times 2^exponent.
template <uint32_t kFormat>
HWY_INLINE uint16_t EncodeBlock(const float* HWY_RESTRICT y, uint32_t n, uint32_t transform, int exponent,
                                uint8_t* HWY_RESTRICT codes) {
  const float sum = SumOfSquaresFixed(y, n);
  if (sum == 0) {
    std::fill_n(codes, n, kFormat >= abi::kTq5 && kFormat <= abi::kTq6 ? (1u << abi::kv_bits(kFormat)) / 2 : 0);
    return 0;
  }
  uint32_t squares = 0;
  if constexpr (kFormat <= abi::kTq4) {
    const float rms = std::sqrt(sum * (1.0f / static_cast<float>(n)));
    if constexpr (kFormat == abi::kTq2) {
      squares = EncodeLevels(y, n, abi::kTq2Gain / rms, abi::kTq2Levels, abi::kTq2Thresholds, codes);
    } else if constexpr (kFormat == abi::kTq3) {
      squares = EncodeLevels(y, n, abi::kTq3Gain / rms, abi::kTq3Levels, abi::kTq3Thresholds, codes);
    } else {
      squares = EncodeLevels(y, n, abi::kTq4Gain / rms, abi::kTq4Levels, abi::kTq4Thresholds, codes);
    }
  } else {
    constexpr uint32_t kBits = abi::kv_bits(kFormat);
    constexpr float kTop = kBits == 8 ? 127.0f : static_cast<float>(1 << (kBits - 1));
    squares = EncodeIntegers<kBits>(y, n, kTop / LargestMagnitude(y, n), codes);
  }
  const float energy = sum * (1.0f / static_cast<float>(transform));
  return EncodeScale(std::sqrt(energy / static_cast<float>(squares)), exponent);
}

template <uint32_t kFormat>
HWY_INLINE void EncodeTransformed(const float* y, uint32_t transform, int exponent, uint8_t* codes,
                                  uint16_t* scales) {
  for (uint32_t begin = 0; begin < transform; begin += abi::kKvScaleBlock) {
    const uint32_t n = std::min(transform - begin, abi::kKvScaleBlock);
    *scales++ = EncodeBlock<kFormat>(y + begin, n, transform, exponent, codes + begin);
  }
}

// Coordinates too large or too small for their squares, or not finite.
template <uint32_t kFormat>
HWY_NOINLINE void EncodeExtreme(const float* x, uint32_t n, uint8_t* codes, uint16_t* scales) {
  alignas(64) float y[abi::kKvMaxHeadDim];
  float largest = 0;
  bool finite = true;
  for (uint32_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  if (!finite) {
    std::fill_n(codes, n, uint8_t{0});
    std::fill_n(scales, (n + abi::kKvScaleBlock - 1) / abi::kKvScaleBlock, abi::kKvScaleNaN);
    return;
  }
  const int exponent = largest == 0 ? 0 : std::ilogb(largest);
  for (uint32_t i = 0; i < n; ++i) y[i] = std::ldexp(x[i], -exponent);
  Hadamard(y, n);
  EncodeTransformed<kFormat>(y, n, exponent, codes, scales);
}

// x: head_dim coordinates with signs applied; changed. y: scratch of the same size.
template <uint32_t kFormat>
HWY_INLINE void EncodeRow(const abi::KvBlocks& blocks, const float* HWY_RESTRICT x, float* HWY_RESTRICT y,
                          KvRow& row) {
  uint16_t* scales = row.scales;
  for (uint32_t b = 0; b < blocks.count; ++b) {
    const uint32_t begin = blocks.begin[b], n = blocks.size[b];
    std::copy_n(x + begin, n, y + begin);
    Hadamard(y + begin, n);
    float sum = 0;
    for (uint32_t part = 0; part < n; part += abi::kKvScaleBlock) {
      sum += SumOfSquaresFixed(y + begin + part, std::min(n - part, abi::kKvScaleBlock));
    }
    if (sum >= 0x1p-80f && sum <= 0x1p120f) {
      EncodeTransformed<kFormat>(y + begin, n, 0, row.codes + begin, scales);
    } else {
      EncodeExtreme<kFormat>(x + begin, n, row.codes + begin, scales);
    }
    scales += (n + abi::kKvScaleBlock - 1) / abi::kKvScaleBlock;
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
