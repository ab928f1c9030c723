#pragma once
// From a row in registers to codes and scales of a native format. The order of every f32 operation
// is docs/kv_formats.md's; only reductions that do not depend on an order (largest, integers) take
// their own.
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/rotation.cuh"

namespace gyre::cuda {

template <uint32_t kSlots>
struct EncodedRow {
  uint32_t codes[kSlots][2];  // a byte a coordinate
  uint32_t scale[kSlots];     // of the scale block that a slot's chunk is part of
};

__device__ inline uint32_t least_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Scale blocks of a head before the one that coordinate `begin` is in.
__device__ inline uint32_t scale_index(uint32_t head_dim, uint32_t size, uint32_t begin) {
  const uint32_t before = head_dim & ~(2 * size - 1);  // coordinates of larger blocks
  const uint32_t large = before / abi::kKvScaleBlock;
  const uint32_t small = static_cast<uint32_t>(__popc(before & (abi::kKvScaleBlock - 1)));
  return large + small + (begin & (size - 1)) / abi::kKvScaleBlock;
}

// v + the value `step` chunks away, where step is not 0. Chunks a whole slot apart meet in
// registers: only rows of two slots have scale blocks that large.
template <uint32_t kSlots>
__device__ void add_partner(const RowPlace<kSlots>& at, const uint32_t (&step)[kSlots],
                            float (&v)[kSlots]) {
  float other[kSlots];
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const uint32_t source = (threadIdx.x & 31) ^ (step[s] & (at.lanes - 1));
    other[s] = __shfl_sync(kAllLanes, v[s], static_cast<int>(source));
    if (step[s] >= at.lanes) other[s] = v[(s ^ 1) % kSlots];
  }
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (step[s] != 0) v[s] = v[s] + other[s];
  }
}

// The groups of a quarter in order: two, or four in a block of 256.
template <uint32_t kSlots>
__device__ void add_groups(const RowPlace<kSlots>& at, const uint32_t (&size)[kSlots],
                           float (&v)[kSlots]) {
  uint32_t step[kSlots];
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) step[s] = size[s] == 128 ? 2 : 0;
  add_partner(at, step, v);
  if (at.head_dim < abi::kKvScaleBlock) return;
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const int first = static_cast<int>(threadIdx.x & 31 & ~6u);
    float sum = __shfl_sync(kAllLanes, v[s], first);
    sum = sum + __shfl_sync(kAllLanes, v[s], first + 2);
    sum = sum + __shfl_sync(kAllLanes, v[s], first + 4);
    sum = sum + __shfl_sync(kAllLanes, v[s], first + 6);
    if (size[s] == abi::kKvScaleBlock) v[s] = sum;
  }
}

template <uint32_t kSlots>
__device__ void sum_squares(const RowPlace<kSlots>& at, const float (&y)[kSlots][kChunk],
                            float (&sum)[kSlots]) {
  float odd[kSlots];
  uint32_t size[kSlots], half[kSlots], quarter[kSlots], lane[kSlots];
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const float(&v)[kChunk] = y[s];
    size[s] = least_of(at.size[s], abi::kKvScaleBlock);
    sum[s] = (v[0] * v[0] + v[2] * v[2]) + (v[1] * v[1] + v[3] * v[3]);
    odd[s] = (v[4] * v[4] + v[6] * v[6]) + (v[5] * v[5] + v[7] * v[7]);
    half[s] = size[s] >= 64 ? size[s] / 16 : 0;
    quarter[s] = size[s] >= 64 ? size[s] / 32 : (size[s] == 32 ? 2 : 0);
    lane[s] = size[s] >= 16 ? 1 : 0;
  }
  add_groups(at, size, sum), add_groups(at, size, odd);
  add_partner(at, half, sum), add_partner(at, half, odd);
  add_partner(at, quarter, sum), add_partner(at, quarter, odd);
  add_partner(at, lane, sum), add_partner(at, lane, odd);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) sum[s] = sum[s] + odd[s];
}

// Over blocks of size[s] coordinates, in any order.
template <uint32_t kSlots, class Combine>
__device__ void reduce_blocks(const RowPlace<kSlots>& at, const uint32_t (&size)[kSlots],
                              uint32_t (&v)[kSlots], const Combine& combine) {
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    if (step >= at.lanes) break;
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, v[s], static_cast<int>(step));
      if (size[s] > step * kChunk) v[s] = combine(v[s], other);
    }
  }
#pragma unroll
  for (uint32_t step = 1; step < kSlots; step *= 2) {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      if ((s & step) != 0 || size[s] <= step * at.lanes * kChunk) continue;
      v[s] = v[s | step] = combine(v[s], v[s | step]);
    }
  }
}

template <uint32_t kSlots>
__device__ void find_largest(const float (&x)[kSlots][kChunk], uint32_t (&largest)[kSlots]) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    largest[s] = 0;
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) {
      const uint32_t magnitude = __float_as_uint(x[s][i]) & 0x7FFFFFFFu;
      largest[s] = largest[s] > magnitude ? largest[s] : magnitude;
    }
  }
}

__device__ inline uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The least integer at or above x, from 0 to 2^22, as a float above 2^23.
__device__ inline float ceil_above(float x) { return __fadd_ru(x, 0x1p23f); }

// As ceil_above, for x from -2^22 on, as a float above 1.5 * 2^23: its lowest bits are those of the
// integer.
__device__ inline float ceil_near(float x) { return __fadd_ru(x, 0x1.8p23f); }

// A polynomial of c / 256, c = ceil(v) up to 256, whose whole part is the index of the nearest
// magnitude for every integer c, by a margin of 0.006 (kernel_text_test goes through them): the
// format decides by the same integer, so nothing is rounded the other way, and comparisons would
// take twice the instructions. Added to 128 the whole part is the third byte of a float.
template <uint32_t kBits>
__device__ float index_polynomial(float x) {
  if constexpr (kBits == 3) {
    float v = __fmaf_rn(x, -2.4274212f, -0.28755062f);
    v = __fmaf_rn(x, v, 6.2631318f);
    return __fmaf_rn(x, v, 128.00713f);
  } else {
    float v = __fmaf_rn(x, 4.597505f, -9.788274f);
    v = __fmaf_rn(x, v, 0.4379766f);
    v = __fmaf_rn(x, v, 12.649843f);
    return __fmaf_rn(x, v, 128.00677f);
  }
}

// The third byte: index of the nearest magnitude. v is doubled, and a threshold belongs to the
// lower one.
template <uint32_t kBits>
__device__ uint32_t magnitude_index(float v) {
  if constexpr (kBits == 2) {
    constexpr float kMiddle = abi::kTq2Thresholds[0];
    return v > kMiddle ? 0x10000u : 0u;
  } else {
    const float x = __saturatef(__fmaf_rn(ceil_above(v), 0x1p-8f, -0x1p15f));
    return __float_as_uint(index_polynomial<kBits>(x));
  }
}

// Byte kByte of four words.
template <uint32_t kByte>
__device__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kPair = kByte | (kByte + 4) << 4;
  return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

template <uint32_t kBits>
__device__ uint32_t magnitude_bytes(uint32_t nibbles) {  // of four indices
  constexpr auto kFour = [](const uint8_t* of) constexpr {
    return of[0] | static_cast<uint32_t>(of[1]) << 8 | static_cast<uint32_t>(of[2]) << 16 |
           static_cast<uint32_t>(of[3]) << 24;
  };
  if constexpr (kBits == 2) {
    constexpr uint32_t kLevels = abi::kTq2Levels[0] | abi::kTq2Levels[1] << 8;
    return __byte_perm(kLevels, 0, nibbles);
  } else if constexpr (kBits == 3) {
    constexpr uint32_t kLevels = kFour(abi::kTq3Levels);
    return __byte_perm(kLevels, 0, nibbles);
  } else {
    constexpr uint32_t kLow = kFour(abi::kTq4Levels), kHigh = kFour(abi::kTq4Levels + 4);
    return __byte_perm(kLow, kHigh, nibbles);
  }
}

// Codes of four coordinates: sign and index of the nearest magnitude. Returns the sum of squared
// levels.
template <uint32_t kBits>
__device__ uint32_t code_magnitudes(const float* y, float factor, uint32_t& codes) {
  uint32_t index[4], bits[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    bits[i] = __float_as_uint(y[i]);
    index[i] = magnitude_index<kBits>(fabsf(y[i]) * factor);
  }
  const uint32_t indices = gather_bytes<2>(index[0], index[1], index[2], index[3]);
  const uint32_t signs = gather_bytes<3>(bits[0], bits[1], bits[2], bits[3]);
  codes = indices | (signs >> (8 - kBits) & 0x01010101u << (kBits - 1));
  const uint32_t levels = magnitude_bytes<kBits>(indices | indices >> 12);  // in another order
  return static_cast<uint32_t>(__dp4a(static_cast<int>(levels), static_cast<int>(levels), 0));
}

// The nearest integer (odd ones below 8 bits), a tie to the lower one.
template <uint32_t kBits>
__device__ uint32_t code_integers(const float* y, float factor, uint32_t& codes) {
  constexpr int kUpper = 1 << (kBits - 1);
  uint32_t code[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const float v = y[i] * factor;
    if constexpr (kBits == 8) {
      code[i] = __float_as_uint(ceil_near(v - 0.5f));  // the lowest byte
    } else {
      const int whole = ceil_to_int(v);
      code[i] = static_cast<uint32_t>(
          (whole < 1 - kUpper ? 1 - kUpper : (whole > kUpper ? kUpper : whole)) + kUpper - 1);
    }
  }
  codes = gather_bytes<0>(code[0], code[1], code[2], code[3]);
  // Bytes 2 c - (2^bits - 1), by way of a number without a sign.
  constexpr uint32_t kOffset = (128u - ((1u << kBits) - 1)) * 0x01010101u;
  const uint32_t levels = kBits == 8 ? codes : ((codes << 1) + kOffset) ^ 0x80808080u;
  return static_cast<uint32_t>(__dp4a(static_cast<int>(levels), static_cast<int>(levels), 0));
}

template <uint32_t kFormat>
__device__ uint32_t code_quad(const float* y, float factor, uint32_t& codes) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_has_magnitudes(kFormat)) return code_magnitudes<kBits>(y, factor, codes);
  if constexpr (!abi::kv_has_magnitudes(kFormat)) return code_integers<kBits>(y, factor, codes);
}
template <uint32_t kFormat>
__device__ uint32_t code_chunk(const float (&y)[kChunk], float factor, uint32_t (&codes)[2]) {
  const uint32_t first = code_quad<kFormat>(y, factor, codes[0]);
  return first + code_quad<kFormat>(y + 4, factor, codes[1]);
}

template <uint32_t kFormat>
inline constexpr uint32_t kZeroCodes = abi::kv_zero_code(kFormat) * 0x01010101u;

// Nearest, ties to even, 8 bits of exponent and 8 of mantissa; x is the scale times 2^31.
__device__ inline uint32_t scale_bits(float x) {
  const uint32_t bits = least_of(__float_as_uint(x), 0x7F800000u);
  return (bits + 0x3FFFu + (bits >> 15 & 1)) >> 15;
}

// What a transformed row is calibrated with: stretch, and the power of two that its blocks lost.
template <uint32_t kSlots>
struct ScaleFactors {
  float stretch;
  float power[kSlots];
};

// y is transformed, sum its sums of squares.
template <uint32_t kFormat, uint32_t kSlots>
__device__ void code_row(const RowPlace<kSlots>& at, const float (&y)[kSlots][kChunk],
                         const ScaleFactors<kSlots>& factors, const float (&sum)[kSlots],
                         EncodedRow<kSlots>& out) {
  constexpr bool kMagnitudes = abi::kv_has_magnitudes(kFormat);
  uint32_t size[kSlots], squares[kSlots], largest[kSlots];
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) size[s] = least_of(at.size[s], abi::kKvScaleBlock);
  if constexpr (!kMagnitudes) {
    find_largest(y, largest);
    reduce_blocks(at, size, largest, larger_of);
  }
  // Slots under one scale have one factor and one root: divisions are not cheap.
  const bool shared = size[0] > at.lanes * kChunk;
  float factor = 0;
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (s == 0 || !shared) {
      const float root = kMagnitudes ? __fsqrt_rn(sum[s] * (1.0f / static_cast<float>(size[s])))
                                     : __uint_as_float(largest[s]);
      factor = __fdiv_rn(abi::kv_codec(kFormat).gain, root);
    }
    squares[s] = code_chunk<kFormat>(y[s], factor, out.codes[s]);
    if (sum[s] == 0) out.codes[s][0] = out.codes[s][1] = kZeroCodes<kFormat>;
  }
  reduce_blocks(at, size, squares, [](uint32_t a, uint32_t b) { return a + b; });
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (s != 0 && shared) {
      out.scale[s] = out.scale[0];
      continue;
    }
    const float energy = sum[s] * (1.0f / static_cast<float>(at.size[s]));
    const float levels = sum[s] == 0 ? 1.0f : static_cast<float>(static_cast<int>(squares[s]));
    const float scale = __fsqrt_rn(__fdiv_rn(energy, levels)) * factors.stretch;
    out.scale[s] = scale_bits(scale * 0x1p31f * factors.power[s]);
  }
}

__device__ inline bool in_range(float sum) { return sum >= 0x1p-80f && sum <= 0x1p120f; }

// Whether a transform block's squares left the range in which nothing is lost. One of 512 has a
// scale a slot.
__device__ inline bool is_extreme(const RowPlace<1>& /*at*/, const float (&sum)[1]) {
  return !in_range(sum[0]);
}
__device__ inline bool is_extreme(const RowPlace<kFewSlots>& at, const float (&sum)[kFewSlots]) {
  if (at.size[0] > abi::kKvScaleBlock) return !in_range(sum[0] + sum[1]);
  return !in_range(sum[0]) || (at.active(1) && !in_range(sum[1]));
}

__device__ inline float power_of_two(int exponent) {  // from -149 to 127
  return exponent >= -126 ? __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23)
                          : __uint_as_float(1u << (exponent + 149));
}

// The exponent that an extreme block loses, from the bits of its largest magnitude.
__device__ inline int lost_exponent(uint32_t largest) {
  const bool fits = largest >= 0x30800000u && largest <= 0x4E800000u;  // 2^-30, 2^30
  if (fits || largest == 0) return 0;
  if (largest < 0x800000u) return -118 - __clz(static_cast<int>(largest));
  const int exponent = static_cast<int>(largest >> 23) - 127;
  return exponent < 128 ? exponent : 127;
}

// Up to 2^149, in two exact steps; down, one product rounds once.
template <uint32_t kCount>
__device__ void lose_exponent(int exponent, float (&x)[kCount]) {
  const int first = -exponent < 127 ? -exponent : 127;
  const float step = power_of_two(first), second_step = power_of_two(-exponent - first);
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) x[i] = x[i] * step * second_step;
}

// A block that is zero or not finite has its scale alone.
template <uint32_t kFormat, uint32_t kSlots>
__device__ void replace_degenerate(const uint32_t (&largest)[kSlots], EncodedRow<kSlots>& out) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (largest[s] != 0 && largest[s] < 0x7F800000u) continue;
    out.codes[s][0] = out.codes[s][1] = kZeroCodes<kFormat>;
    out.scale[s] = largest[s] == 0 ? 0u : uint32_t{abi::kKvScaleNaN};
  }
}

// x: the row with its signs.
template <uint32_t kFormat, uint32_t kSlots>
__device__ void code_extreme_row(const RowPlace<kSlots>& at, float stretch,
                                 float (&x)[kSlots][kChunk], EncodedRow<kSlots>& out) {
  uint32_t largest[kSlots];
  float sum[kSlots];
  ScaleFactors<kSlots> factors;
  factors.stretch = stretch;
  find_largest(x, largest);
  reduce_blocks(at, at.size, largest, larger_of);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const int exponent = lost_exponent(largest[s]);
    factors.power[s] = power_of_two(exponent);
    lose_exponent(exponent, x[s]);
  }
  transform<false>(at, x);
  sum_squares(at, x, sum);
  code_row<kFormat>(at, x, factors, sum, out);
  replace_degenerate<kFormat>(largest, out);
}

}  // namespace gyre::cuda
