// Scales of tiles, probabilities times the scales of V as integers in two bytes, and the walk over
// V with them.
#pragma once

#include "cpu/attention/isa/neon.h"

namespace gyre::cpu {
namespace {

inline float32x4_t key_scales(const uint8_t* scales) {
  const uint16x4_t stored = vreinterpret_u16_u8(vld1_u8(scales));
  return vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(stored, 15)), 0x1p-31f);
}

inline constexpr float kHuge = 1e38f, kTiny = 0x1p-90f;

// 16 bits without a sign, for a product of bytes with and without a sign.
struct UnsignedBytes {
  static constexpr float kMost = 65535.0f;
  static uint8x16_t split(float32x4_t a, float32x4_t b) {
    const uint16x4_t first = vqmovn_u32(vcvtnq_u32_f32(a)), second = vqmovn_u32(vcvtnq_u32_f32(b));
    const uint8x16_t w = vreinterpretq_u8_u16(vcombine_u16(first, second));
    return vcombine_u8(vget_low_u8(vuzp2q_u8(w, w)), vget_low_u8(vuzp1q_u8(w, w)));
  }
};

// 15 bits, for a product of bytes that both have a sign: the lower byte is -128 to 127, and the
// upper one rounded to match.
struct SignedBytes {
  static constexpr float kMost = 127.0f * 256.0f;
  static uint8x16_t split(float32x4_t a, float32x4_t b) {
    const int16x8_t w = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a)), vmovn_s32(vcvtnq_s32_f32(b)));
    return vreinterpretq_u8_s8(vcombine_s8(vrshrn_n_s16(w, 8), vmovn_s16(w)));
  }
};

// Probabilities of a block times the values' scales, as integers against the largest of the row:
// for each tile the upper bytes of its tokens, then the lower bytes.
struct Weights {
  using OfRow = uint8_t[kBlockKeys / kTile][2 * kTile];
  alignas(16) OfRow bytes[kTileRows];
  float unit[kTileRows];
};

// A key that is not seen must not bring in its scale, which may be NaN. Returns the largest
// product.
inline float weigh_with_care(const float* p, const float* scales, uint32_t vectors,
                             float32x4_t* weighted) {
  float32x4_t largest = vdupq_n_f32(0);
  for (size_t i = 0; i < vectors; ++i) {
    const float32x4_t probability = vld1q_f32(p + 4 * i);
    const uint32x4_t unseen = vceqzq_f32(probability);
    const float32x4_t product = vmulq_f32(probability, vld1q_f32(scales + 4 * i));
    weighted[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), unseen));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  return vmaxvq_f32(largest);
}

template <class Bytes>
void weigh_row(const AccumulateJob& job, const float* scales, size_t row, Weights& out) {
  const float* const p = job.p + row * kBlockKeys;
  float32x4_t weighted[kBlockKeys / 4];
  float32x4_t largest = vdupq_n_f32(0);
  const uint32_t vectors = job.tiles * 2;
  for (size_t i = 0; i < vectors; ++i) {
    weighted[i] = vmulq_f32(vld1q_f32(p + 4 * i), vld1q_f32(scales + 4 * i));
    largest = vmaxq_f32(largest, weighted[i]);
  }
  float top = vmaxvq_f32(largest);
  if (!(top < kHuge)) top = weigh_with_care(p, scales, vectors, weighted);
  out.unit[row] = top / (Bytes::kMost / 256.0f);
  float inverse = top > 0 ? Bytes::kMost / top : 0.0f;
  if (top < kTiny) {  // the inverse would overflow: take it in two steps
    for (size_t i = 0; i < vectors; ++i) weighted[i] = vmulq_n_f32(weighted[i], 0x1p60f);
    inverse = top > 0 ? Bytes::kMost / (top * 0x1p60f) : 0.0f;
  }
  for (size_t t = 0; t < job.tiles; ++t) {
    vst1q_u8(out.bytes[row][t], Bytes::split(vmulq_n_f32(weighted[2 * t], inverse),
                                             vmulq_n_f32(weighted[2 * t + 1], inverse)));
  }
}

// Of all rows, under one of the tiles' scales.
template <class Bytes>
void weigh_rows(const AccumulateJob& job, size_t block, Weights& out) {
  float scales[kBlockKeys];
  for (size_t tile = 0; tile < job.tiles; ++tile) {
    const uint8_t* const stored = job.scales + tile * job.scales_stride + block * kTile * 2;
    vst1q_f32(scales + tile * kTile, key_scales(stored));
    vst1q_f32(scales + tile * kTile + 4, key_scales(stored + 8));
  }
  for (size_t row = 0; row < job.rows; ++row) weigh_row<Bytes>(job, scales, row, out);
}

// Under one scale; c counts coordinates. Few rows take two units of eight at a time.
template <class Products, uint32_t kFormat, size_t kRows>
void accumulate_rows(const AccumulateJob& job, const Weights& weights, size_t row, size_t block) {
  constexpr size_t kUnits = kRows <= 2 ? 2 : 1;
  const typename Products::template Loader<kFormat> loader;
  size_t c = job.blocks->begin[block];
  const size_t end = c + job.blocks->size[block];
  for (; c + 8 * kUnits <= end; c += 8 * kUnits) {
    if (row == 0) fetch(job.prefetch, c / 8, c / 8 + kUnits);
    Products::template accumulate<kFormat, kRows, kUnits>(job, loader, weights, row, c);
  }
  if (c < end) Products::template accumulate<kFormat, kRows, 1>(job, loader, weights, row, c);
}

template <class Products, uint32_t kFormat>
void accumulate_blocks(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    weigh_rows<typename Products::Bytes>(job, block, weights);
    for_row_groups(job.rows, [&](auto rows, size_t row) {
      accumulate_rows<Products, kFormat, decltype(rows)::value>(job, weights, row, block);
    });
  }
}

}  // namespace
}  // namespace gyre::cpu
