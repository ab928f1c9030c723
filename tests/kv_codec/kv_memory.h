#pragma once
// One half of a KV cache as bytes, written by the reference, and what it holds in the clear.

#include <functional>
#include <vector>

#include "kv_codec/kv_codec_case.h"

namespace gyre::test {

struct KvMemory {
  Block codes;
  Block scales;                // empty for dense formats
  std::vector<double> values;  // [capacity, kv_heads, head_dim]
};

// `row_of(slot)` is called for each head of each slot in turn. Dense formats lie as `layout` says.
KvMemory kv_memory(const KvShape& shape, KvLayout layout,
                   const std::function<std::vector<float>(uint64_t slot)>& row_of);

// The cache over those bytes, each a flat tensor.
KvBuffer kv_buffer(const KvShape& shape, KvLayout layout, const Tensor& codes,
                   const Tensor& scales);

// The dtype of a dense format.
DType kv_dtype(KvFormat format);

}  // namespace gyre::test
