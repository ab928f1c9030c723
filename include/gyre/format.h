#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "gyre/device.h"
#include "gyre/export.h"
#include "gyre/tensor.h"

namespace gyre {

// How a cache stores the coordinates of a head. docs/kv_formats.md draws the bytes.
enum class KvFormat : uint8_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  // Rotated, an integer level times a scale; the number is the bits per coordinate.
  tq2 = 16,
  tq3 = 17,
  tq4 = 18,
  tq5 = 19,
  tq6 = 20,
  tq8 = 21,
  // mlx-native formats: byte for byte what mlx-native writes.
  mlx_native4 = 32,
  mlx_native5 = 33,
  mlx_native6 = 34,
  mlx_native8 = 35,
};

// K is stored row by row, V in tiles of 8 tokens (native formats), because attention walks them
// differently.
enum class KvRole : uint8_t { k, v };

// u8e8: 16 bits, 8 of exponent and 8 of mantissa. f32_norm: the length of what it belongs to.
enum class KvScaleKind : uint8_t { none, u8e8, f32_norm };

// Where the bits of a coordinate lie.
enum class KvPacking : uint8_t {
  dense,    // one element each
  planes,   // a low and a high plane, in groups of 16 bytes (K) or tiles of 8 tokens (V)
  nibbles,  // two to a byte, the even coordinate in the low half
  bytes,    // one byte each
};

constexpr uint32_t kKvSignsVersion = 1;  // of the sign generator, the one this library has

// Travels with the data: what a reader must know to decode it.
struct KvFormatInfo {
  KvFormat format = KvFormat::f16;
  std::string_view name{};
  uint32_t bits = 16;  // stored per coordinate
  bool compressed = false;
  KvPacking packing = KvPacking::dense;
  KvScaleKind scale = KvScaleKind::none;
  uint32_t scale_block = 0;    // coordinates under one scale, at most
  uint32_t tile_tokens = 1;    // V: tokens that share words
  uint32_t signs_version = 0;  // of the generator; 0: no signs or mlx-native's table
};

GYRE_API KvFormatInfo describe(KvFormat format);
GYRE_API std::string_view name(KvFormat format);
GYRE_API std::span<const KvFormat> kv_formats();     // all of them
GYRE_API KvFormat kv_format(std::string_view name);  // refuses names that are none

struct KvShape {
  KvFormat format = KvFormat::f16;
  KvRole role = KvRole::k;
  uint64_t kv_heads = 0;
  uint64_t capacity = 0;  // slots
  uint64_t head_dim = 0;
  uint32_t signs_version = kKvSignsVersion;  // native formats: what the data was written with
  float scale_factor = 1;  // mlx-native formats of head_dim 512: mlx-native's scale_factor_d512
};

// One of the two halves of a KV cache: memory and what it means. Copying copies handles.
struct KvBuffer {
  KvShape shape{};
  Tensor codes{};   // dense: [kv_heads, capacity, head_dim]; else u8, see docs/kv_formats.md
  Tensor scales{};  // undefined for dense formats

  // Zero-filled. Refuses head dims the format cannot store.
  GYRE_API static KvBuffer allocate(const Device& device, const KvShape& shape);
  uint64_t bytes() const { return codes.bytes() + scales.bytes(); }
};

// Dimensions of the two tensors, for callers that bring their own memory.
GYRE_API Dims kv_codes_shape(const KvShape& shape);
GYRE_API Dims kv_scales_shape(const KvShape& shape);

}  // namespace gyre
