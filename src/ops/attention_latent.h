#pragma once
// Latent attention (MLA): one KV head, whose K is the latent and whose V is the rotary part of K.
// What it refuses, the dims of its rows, and how a caller's splits are recorded.

#include "ops/attention_dispatch.h"

namespace gyre {

// Coordinates of a query and of an output row.
struct RowDims {
  uint64_t query, out;
};
constexpr RowDims row_dims(bool latent, uint64_t k_dim, uint64_t v_dim) {
  return latent ? RowDims{k_dim + v_dim, k_dim} : RowDims{k_dim, v_dim};
}
inline RowDims row_dims(const KvPageShape& shape) {
  return row_dims(shape.latent, shape.head_dim,
                  shape.v_head_dim != 0 ? shape.v_head_dim : shape.head_dim);
}
inline RowDims row_dims(const AttentionPartialInputs& in) {
  return row_dims(in.latent, in.k_cache.shape.head_dim, in.v_cache.shape.head_dim);
}

bool is_latent_format(KvFormat format);  // of the latent and of the rotary part

struct LatentShape {
  KvFormat latent, rotary;
  uint64_t kv_heads, latent_dim, rotary_dim;
};
void check_latent_shape(const char* op, const LatentShape& shape);
void check_latent_options(const char* op, std::optional<float> scale, const AttentionMask& mask);

// The kernel of a device, as DeviceImpl::describe has it; of a device without one a sentence.
std::string describe_latent(const Device& device, const KvShape& latent, const KvShape& rotary);
bool supports_latent(const Device& device, const AttentionTypes& types);
// Refuses a device whose plan names a kernel that it does not have.
void require_latent_kernel(const Recording& recording, const char* op,
                           const abi::AttentionProblem& problem, const abi::AttentionPlan& plan);

}  // namespace gyre
