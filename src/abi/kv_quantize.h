#pragma once
// kv_quantize and kv_dequantize.
#include "abi/kv_codec.h"

namespace gyre::abi {

struct KvQuantizeSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat
  uint8_t v_format;      // 0 with K alone
  uint8_t unused[5];
};

// Strides in bytes. A tile is 8 slots: 8 rows of K, one tile of V.
struct KvCacheLayout {
  uint64_t codes_head_stride;
  uint64_t codes_tile_stride;
  uint64_t scales_head_stride;
  uint64_t scales_tile_stride;
  uint32_t format;
  uint32_t role;  // KvRole
  uint32_t head_dim;
  uint32_t unused;
};

struct KvQuantizeStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  KvCacheLayout cache;
};

struct KvQuantizeParams {
  uint64_t tokens;  // <= capacity
  uint64_t heads;
  uint64_t first_slot;
  uint64_t capacity;
  uint64_t first_tile;  // tiles touched, modulo all tiles
  uint64_t tiles;
  uint64_t all_tiles;
  uint64_t streams;
  KvQuantizeStream stream[2];
};

struct KvDequantizeSpec {
  uint8_t out_dtype;
  uint8_t format;
  uint8_t unused[6];
};

struct KvDequantizeParams {
  uint64_t tokens;
  uint64_t heads;
  uint64_t first_slot;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  KvCacheLayout cache;
  uint32_t rotated;  // 1: leave the transform in
  uint32_t unused;
};

struct HadamardSpec {
  uint8_t x_dtype;
  uint8_t out_dtype;
  uint8_t unused[6];
};

struct HadamardParams {
  uint64_t rows[2];  // outer, inner
  uint64_t x_stride[2];
  uint64_t out_stride[2];
  uint32_t head_dim;
  uint32_t inverse;
  uint32_t signs;  // HadamardSigns
  uint32_t unused;
};

}  // namespace gyre::abi
