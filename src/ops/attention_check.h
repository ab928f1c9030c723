#pragma once
// What attention, its two halves and a cache's attention refuse.

#include <initializer_list>

#include "gyre/attention.h"
#include "ops/cache_ops.h"

namespace gyre {

// Queries over one cache.
struct AttentionCall {
  const char* op = nullptr;
  const AttentionPartialInputs& in;
  const AttentionOptions& options;
  const CacheState* state = nullptr;  // then length and ring_start are found on the device
};

// Queries [tokens, heads, head_dim]; `keys` names what they are held against.
void check_query(const char* op, const Tensor& q, const char* keys, uint64_t kv_heads,
                 uint64_t head_dim);
// What multiplies the dot product: 1 / sqrt(head_dim) where nothing is given.
float checked_scale(const char* op, std::optional<float> given, uint64_t head_dim);
// All of a mask but its tree_mask.
void check_mask(const char* op, const AttentionMask& mask, uint64_t heads);
void check_per_head(const char* op, const char* what, const Tensor& tensor, uint64_t heads);

void check_call(const AttentionCall& call);
// `shape`: [tokens, heads, head_dim] of out; lse has the first two.
void check_outputs(const char* op, const AttentionMergeInputs& in, const Dims& shape);
void check_partial_tensor(const char* op, const Tensor& partial);
// Outputs share no memory with inputs.
void check_apart(const char* op, const char* what, const Tensor& written,
                 std::initializer_list<const Tensor*> read);

}  // namespace gyre
