#pragma once
// attention, attention_partial and attention_merge.
#include "abi/kv_quantize.h"

namespace gyre::abi {

struct AttentionSpec {
  uint8_t q_dtype;    // DType
  uint8_t out_dtype;  // DType; f32 for partial states
  uint8_t k_format;   // KvFormat
  uint8_t v_format;
  uint8_t unused[4];
};

// Strides in bytes. Rows of a KV head are its (token, query head) pairs, the head running fastest.
struct AttentionParams {
  uint64_t tokens;
  uint64_t heads;
  uint64_t kv_heads;
  uint64_t length;
  uint64_t capacity;
  uint64_t ring_start;
  uint64_t first_key;  // no query sees an older one
  uint64_t window;     // 0: all
  uint64_t splits;
  uint64_t split_keys;  // keys per split, counted from first_key
  uint64_t q_token_stride;
  uint64_t q_head_stride;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  uint64_t lse_token_stride;
  uint64_t lse_head_stride;
  uint64_t tree_stride;
  KvCacheLayout k;
  KvCacheLayout v;
  float scale;
  float soft_cap;  // 0: off
  uint32_t causal;
  uint32_t partial;  // 1: the states are wanted, not the output
};

struct AttentionMergeSpec {
  uint8_t out_dtype;
  uint8_t unused[7];
};

struct AttentionMergeParams {
  uint64_t splits;
  uint64_t tokens;
  uint64_t heads;
  uint64_t head_dim;
  uint64_t out_token_stride;
  uint64_t out_head_stride;
  uint64_t lse_token_stride;
  uint64_t lse_head_stride;
};

}  // namespace gyre::abi
