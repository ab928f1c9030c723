#pragma once
// kv_quantize: new tokens of K and V become codes and scales.
#include "abi/kv_layout.h"

namespace gyre::abi {

struct KvQuantizeSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat
  uint8_t v_format;      // 0 with K alone
  uint8_t unused[5];
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

}  // namespace gyre::abi
