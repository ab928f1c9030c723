#pragma once
// kv_quantize: new tokens of K, of V or of both become codes and scales.
#include "abi/kv_layout.h"

namespace gyre::abi {

struct KvQuantizeSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat; 0 with V alone
  uint8_t v_format;      // 0 with K alone
  uint8_t calibrated;    // streams whose source is calibrated rows: 1 K, 2 V
  uint8_t unused[4];
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
  uint32_t first_stream;       // 0: K, 1: V alone
  uint32_t streams;            // how many from there on
  KvQuantizeStream stream[2];  // K, V
};

}  // namespace gyre::abi
