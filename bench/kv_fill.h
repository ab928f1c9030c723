#pragma once
// KV buffers for benchmarks: written from tokens, read back, and what they take.

#include "attention_runs.h"
#include "gyre/device.h"
#include "gyre/format.h"

namespace gyre::bench {

struct KvPair {
  KvBuffer k, v;
  uint64_t bytes() const { return k.bytes() + v.bytes(); }
};

KvPair allocate(const Device& device, const AttentionShape& shape, const FormatPair& formats);

// Writes every slot, from the first token again where there are fewer tokens than slots. Tokens are
// [tokens, kv_heads, head_dim].
void fill(const Device& device, const KvPair& cache, const Tensor& k, const Tensor& v);

// f32 [capacity, kv_heads, head_dim]: what attention sees.
Tensor decoded(const Device& device, const KvBuffer& cache);

// Bytes of one token in one layer.
double token_bytes(const Device& device, const FormatPair& formats, AttentionShape shape);

// Refuses to measure what the device has no memory for.
void check_fits(std::string_view who, const Device& device, double bytes, uint64_t context);

}  // namespace gyre::bench
