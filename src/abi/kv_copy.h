#pragma once
// kv_copy: cache[slot(t), h, :] = convert(source[t, h, :]) for K and, if streams == 2, for V.
#include "abi/types.h"

namespace gyre::abi {

struct KvCopySpec {
  uint8_t source_dtype;  // DType
  uint8_t cache_dtype;
  uint8_t unused[6];
};

// Strides in bytes. Coordinates of one row are contiguous on both sides.
struct KvCopyStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint64_t cache_slot_stride;
  uint64_t cache_head_stride;
  uint64_t row_elements;
};

struct KvCopyParams {
  uint64_t tokens;      // <= capacity: early tokens of an overlong ring write are dropped by the op
  uint64_t heads;       // 1 when all heads of a token are one contiguous row on both sides
  uint64_t first_slot;  // < capacity
  uint64_t capacity;
  uint64_t streams;  // 1: K, 2: K and V
  KvCopyStream stream[2];
};

// A ring wraps at most once per call, a linear cache never: no division per token.
inline uint64_t kv_copy_slot(const GYRE_PARAMS KvCopyParams& params, uint64_t token) {
  const uint64_t slot = params.first_slot + token;
  return slot < params.capacity ? slot : slot - params.capacity;
}

}  // namespace gyre::abi
