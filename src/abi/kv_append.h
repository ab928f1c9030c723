#pragma once
// kv_append: the tokens of a step go to sinks, body and tail.
#include "abi/kv_layout.h"
#include "abi/kv_state.h"

namespace gyre::abi {

struct KvAppendSpec {
  uint8_t source_dtype;  // DType
  uint8_t k_format;      // KvFormat of the body
  uint8_t v_format;
  uint8_t unused[5];
};

// Strides in bytes. Sinks and tail are f16.
struct KvAppendStream {
  uint64_t source_token_stride;
  uint64_t source_head_stride;
  uint64_t sinks_head_stride;
  uint64_t tail_head_stride;
  KvCacheLayout body;
};

// A tail that is too short for old and new tokens side by side is written after the body, by a
// second command.
constexpr uint32_t kAppendBody = 1, kAppendNear = 2;

struct KvAppendParams {
  uint64_t tokens;
  uint64_t heads;
  KvPlaces places;
  KvAppendStream stream[2];
  uint32_t parts;  // kAppendBody, kAppendNear or both
  uint32_t unused;
};

}  // namespace gyre::abi
