#pragma once

#include <cstdint>
#include <optional>

#include "gyre/encoder.h"
#include "gyre/tensor.h"

namespace gyre {

// What happens at the end of a cache. linear: writing past the last slot is refused.
// ring: token at position p lives in slot p mod capacity.
enum class CacheKind : uint8_t { linear, ring };

struct KvCopyInputs {
  Tensor k;        // [tokens, kv_heads, head_dim]
  Tensor k_cache;  // [capacity, kv_heads, head_dim]
  Tensor v;        // like k and k_cache, head_dim may differ; leave both undefined to copy K alone
  Tensor v_cache;
};

struct KvCopyOptions {
  uint64_t position = 0;  // of the first copied token; on a ring any position, taken mod capacity
  CacheKind cache = CacheKind::linear;
  uint64_t source_begin = 0;       // first token of k and v to copy
  std::optional<uint64_t> tokens;  // how many; all from source_begin if not given
};

struct KvCopyTypes {
  DType source;
  DType cache;
};

// Writes new tokens into a KV cache, converting between f32, f16 and bf16 (nearest, ties to even;
// same dtype: bit copy). Layout is strides: a head-major cache [kv_heads, capacity, head_dim] is
// passed as cache.permute({1, 0, 2}). head_dim must be contiguous. More tokens than slots on a
// ring: the last ones stay. No tokens, heads or coordinates: nothing is recorded.
void kv_copy(Encoder& encoder, const KvCopyInputs& inputs, const KvCopyOptions& options = {});

}  // namespace gyre
