#pragma once

#include <cstdint>
#include <optional>

#include "gyre/calibration.h"
#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/pages.h"
#include "gyre/tensor.h"

namespace gyre {

// What happens at the end of a cache. linear: writing past the last slot is refused.
// ring: token at position p lives in slot p mod capacity.
enum class CacheKind : uint8_t { linear, ring };

// Which tokens go to which slots of a cache: kv_copy and kv_quantize.
struct KvRange {
  uint64_t position = 0;  // of the first token written; on a ring any position, taken mod capacity
  CacheKind cache = CacheKind::linear;
  uint64_t source_begin = 0;         // first token of k and v to write
  std::optional<uint64_t> tokens{};  // how many; all from source_begin if not given
};

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

GYRE_API bool supports(const Device& device, const KvCopyTypes& types);

// Writes new tokens into a KV cache, converting between f32, f16 and bf16 (nearest, ties to even;
// same dtype: bit copy). Layout is strides: a head-major cache [kv_heads, capacity, head_dim] is
// passed as cache.permute({1, 0, 2}). head_dim must be contiguous. More tokens than slots on a
// ring: the last ones stay. No tokens, heads or coordinates: nothing is recorded.
GYRE_API void kv_copy(Encoder& encoder, const KvCopyInputs& inputs, const KvRange& options = {});

struct KvWriteInputs {
  Tensor k{};  // [tokens, kv_heads, head_dim], f32, f16 or bf16, head_dim contiguous
  Tensor v{};  // like k, v_head_dim
  KvPages pages{};
  Tensor slots{};  // i64 or i32 [tokens]: page * page_tokens + offset in the page
  // How codes are chosen, for native formats; of f32, f16 and bf16 the basis alone, of both or
  // neither.
  KvCalibration k_calibration{};
  KvCalibration v_calibration{};
};

// Writes tokens to the slots that a list in device memory names, compressed or as they are. Slots
// come in any order. A negative slot is skipped, and so is one that is not in the pages. Slots not
// named keep their bits. Of two tokens for one slot the later is kept.
GYRE_API void kv_write(Encoder& encoder, const KvWriteInputs& inputs);

}  // namespace gyre
