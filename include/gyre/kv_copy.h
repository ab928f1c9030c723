#pragma once

#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/tensor.h"
#include "gyre/write.h"

namespace gyre {

struct KvCopyInputs {
  Tensor k{};        // [tokens, kv_heads, head_dim]
  Tensor k_cache{};  // [capacity, kv_heads, head_dim]
  Tensor v{};  // like k and k_cache, head_dim may differ; leave both undefined to copy K alone
  Tensor v_cache{};
};

struct KvCopyTypes {
  DType source = DType::f32;
  DType cache = DType::f32;
};

// Writes new tokens into a KV cache, converting between f32, f16 and bf16 (nearest, ties to even;
// same dtype: bit copy). Layout is strides: a head-major cache [kv_heads, capacity, head_dim] is
// passed as cache.permute({1, 0, 2}). head_dim must be contiguous. More tokens than slots on a
// ring: the last ones stay. No tokens, heads or coordinates: nothing is recorded.
GYRE_API void kv_copy(Encoder& encoder, const KvCopyInputs& inputs, const KvRange& options = {});

}  // namespace gyre
