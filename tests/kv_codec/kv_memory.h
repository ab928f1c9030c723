#pragma once
// One half of a KV cache as bytes, written by the reference, and what it holds in the clear.

#include "gyre_test.h"
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

// As large, and empty.
KvMemory kv_memory(const KvShape& shape, KvLayout layout);

struct KvRowPlace {
  uint64_t slot = 0, head = 0;
};

// The bytes of a cache's half.
struct KvBytes {
  Bytes& codes;
  Bytes& scales;
};

// Stores a row as the specification says. Returns what the row then holds.
std::vector<double> write_kv_row(const KvShape& shape, KvLayout layout, const KvRowPlace& at,
                                 const std::vector<float>& row, const KvBytes& bytes);

// What a call must leave in one row: all bits.
void expect_kv_row(const KvShape& shape, KvLayout layout, const KvRowPlace& at,
                   const std::vector<float>& row, KvMemory& memory);

// Whether the codes of the row follow from the specification: none lies between two.
bool has_codes(const KvShape& shape, const std::vector<float>& row);

// A row of normal numbers that the dtype holds, with such codes.
std::vector<float> normal_row(const KvShape& shape, DType dtype, std::mt19937& random);

// The cache over those bytes, each a flat tensor.
KvBuffer kv_buffer(const KvShape& shape, KvLayout layout, const Tensor& codes,
                   const Tensor& scales);

// The dtype of a dense format.
DType kv_dtype(KvFormat format);

}  // namespace gyre::test
