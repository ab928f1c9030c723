#pragma once
// kv_dequantize: slots of a compressed cache become rows of floats.
#include "abi/kv_layout.h"

namespace gyre::abi {

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

}  // namespace gyre::abi
