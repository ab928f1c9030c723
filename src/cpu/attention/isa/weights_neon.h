#pragma once
// Weights of V in fixed point: probabilities times the scales of V, as integers in a hi and a lo
// byte, and the loop over V that multiplies with them.

#include <arm_neon.h>

#include "cpu/attention/isa/unpacked_neon.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

inline float32x4_t key_scales(const uint8_t* scales) {
  const uint16x4_t stored = vreinterpret_u16_u8(vld1_u8(scales));
  return vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(stored, 15)), 0x1p-31f);
}

inline constexpr float kHuge = 1e38f, kTiny = 0x1p-90f;

// Weights for an MMA of unsigned with signed bytes: 16 bits.
struct UnsignedBytes {
  static constexpr float kMax = 65535.0f;
  static constexpr bool kPaired = true;
  static uint8x8_t hi(uint16x8_t whole) { return vshrn_n_u16(whole, 8); }
};

// Weights for a dot product of signed bytes: 15 bits, lo from -128 to 127 and hi rounded to match.
struct SignedBytes {
  static constexpr float kMax = 127.0f * 256.0f;
  static constexpr bool kPaired = false;
  static uint8x8_t hi(uint16x8_t whole) { return vrshrn_n_u16(whole, 8); }
};

// A block's weights relative to the largest of each row. For each tile hi of its tokens, then lo;
// or, paired, hi of both rows in the place of the first row, lo in that of the second.
struct Weights {
  using Row = uint8_t[kBlockKeys / kTile][2 * kTile];
  alignas(16) Row bytes[kTileRows];
  float step[kTileRows];   // the fixed-point scale: what 256 stands for
  int32_t sum[kTileRows];  // of whole weights

  void store(size_t row, size_t tile, bool paired, uint8x8_t hi, uint8x8_t lo) {
    const size_t first = paired ? row & ~size_t{1} : row, second = paired ? row | 1 : row;
    vst1_u8(bytes[first][tile] + (paired ? row % 2 * kTile : 0), hi);
    vst1_u8(bytes[second][tile] + (paired ? row % 2 * kTile : kTile), lo);
  }
};

// w * factor of eight tokens, rounded: below 2^16, these are the last bits of a float from 2^23 on.
inline uint16x8_t round_products(float32x4_t a, float32x4_t b, float factor) {
  const float32x4_t magic = vdupq_n_f32(0x1p23f);
  return vuzp1q_u16(vreinterpretq_u16_f32(vfmaq_n_f32(magic, a, factor)),
                    vreinterpretq_u16_f32(vfmaq_n_f32(magic, b, factor)));
}

// Multiplies probabilities with scales; leaves out keys that the row does not see, whose scale may
// be NaN. Returns the largest weight.
inline float weights_of_seen(const float* p, const float* scales, uint32_t vectors,
                             float32x4_t* weighted) {
  float32x4_t largest = vdupq_n_f32(0);
  for (size_t i = 0; i < vectors; ++i) {
    const float32x4_t probability = vld1q_f32(p + 4 * i);
    const uint32x4_t hidden = vceqzq_f32(probability);
    const float32x4_t product = vmulq_f32(probability, vld1q_f32(scales + 4 * i));
    weighted[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), hidden));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  return vmaxvq_f32(largest);
}

template <class Bytes>
void round_row_weights(const AccumulateJob& job, const float* scales, size_t row, Weights& out) {
  const float* const p = job.p + row * kBlockKeys;
  float32x4_t weighted[kBlockKeys / 4];
  float32x4_t largest = vdupq_n_f32(0);
  const uint32_t vectors = job.tiles * 2;
  for (size_t i = 0; i < vectors; ++i) {
    weighted[i] = vmulq_f32(vld1q_f32(p + 4 * i), vld1q_f32(scales + 4 * i));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  float max_weight = vmaxvq_f32(largest);
  if (!(max_weight < kHuge)) max_weight = weights_of_seen(p, scales, vectors, weighted);
  out.step[row] = max_weight / (Bytes::kMax / 256.0f);
  float inverse = max_weight > 0 ? Bytes::kMax / max_weight : 0.0f;
  if (max_weight < kTiny) {  // the inverse would overflow: take it in two steps
    for (size_t i = 0; i < vectors; ++i) weighted[i] = vmulq_n_f32(weighted[i], 0x1p60f);
    inverse = max_weight > 0 ? Bytes::kMax / (max_weight * 0x1p60f) : 0.0f;
  }
  const bool paired = Bytes::kPaired && (row | 1) < job.rows;
  uint32x4_t sum = vdupq_n_u32(0);
  for (size_t t = 0; t < job.tiles; ++t) {
    const uint16x8_t whole = round_products(weighted[2 * t], weighted[2 * t + 1], inverse);
    sum = vpadalq_u16(sum, whole);
    out.store(row, t, paired, Bytes::hi(whole), vmovn_u16(whole));
  }
  out.sum[row] = static_cast<int32_t>(vaddvq_u32(sum));
}

// Weights of all rows under one scale block.
template <class Bytes>
void round_weights(const AccumulateJob& job, size_t block, Weights& out) {
  float scales[kBlockKeys];
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const uint8_t* const stored = job.scales + tile * job.scales_stride + block * kTile * 2;
    vst1q_f32(scales + tile * kTile, key_scales(stored));
    vst1q_f32(scales + tile * kTile + 4, key_scales(stored + 8));
  }
  for (size_t row = 0; row < job.rows; ++row) round_row_weights<Bytes>(job, scales, row, out);
}

// acc = acc * rescale + sums of levels, for kCount vectors of a row from coordinate c on: sum(i).
template <uint32_t kFormat, size_t kCount, class Sum>
inline void add_sums(const AccumulateJob& job, const Weights& weights, size_t row, size_t c,
                     const Sum& sum) {
  float* const place = job.acc + row * job.head_dim + c;
  const float rescale = job.rescale[row];
  const int32_t bias = kCodeBias<kFormat> * weights.sum[row];
  for (size_t i = 0; i < kCount; ++i) {
    // The step is worth 256: eight bits are behind the point.
    const float32x4_t levels = vcvtq_n_f32_s32(level_sum<kFormat>(sum(i), bias), 8);
    const float32x4_t old = vld1q_f32(place + 4 * i);
    vst1q_f32(place + 4 * i, vfmaq_n_f32(rescale == 1 ? old : vmulq_n_f32(old, rescale), levels,
                                         weights.step[row]));
  }
}

// Accumulates kRows rows over one scale block. Few rows take two octets of coordinates at a time.
template <class Kernel, uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row, size_t block) {
  constexpr size_t kOctets = kRows <= 2 ? 2 : 1;
  const typename Kernel::template Values<kFormat> unpack;
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 8 * kOctets <= end; c += 8 * kOctets) {
    if (row == 0) prefetch_steps(job.prefetch, c / 8, c / 8 + kOctets);
    Kernel::template accumulate<kFormat, kRows, kOctets>(job, unpack, weights, row, c);
  }
  if (c < end) Kernel::template accumulate<kFormat, kRows, 1>(job, unpack, weights, row, c);
}

template <class Kernel, uint32_t kFormat>
void accumulate_blocks(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    round_weights<typename Kernel::Bytes>(job, block, weights);
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      accumulate_rows<Kernel, kFormat, decltype(rows)::value>(job, weights, row, block);
    });
  }
}

template <class Kernel, uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  if (!unpacks_once<kFormat>(job.rows)) return accumulate_blocks<Kernel, kFormat>(job);
  accumulate_blocks<Kernel, kUnpacked>(with_unpacked_values<typename Kernel::Order, kFormat>(job));
}

template <class Kernel>
void accumulate_levels(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<Kernel, decltype(format)::value>(job); });
}

}  // namespace
}  // namespace gyre::cpu
