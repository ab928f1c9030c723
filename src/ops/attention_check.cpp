#include "ops/attention_check.h"

#include <algorithm>
#include <cmath>

#include "ops/attention_latent.h"
#include "ops/kv_layout.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_cache(const char* op, const char* what, const KvBuffer& cache, KvRole role) {
  check_kv_buffer(op, what, cache);
  require(cache.shape.role == role, op, ": ", what, " must have role ",
          role == KvRole::k ? "k" : "v");
  require(cache.shape.head_dim >= 16 && cache.shape.head_dim % 8 == 0, op, ": head_dim of ", what,
          " must be a multiple of 8 from 16, got ", cache.shape.head_dim);
}

void check_caches(const char* op, const AttentionPartialInputs& in) {
  check_cache(op, "k_cache", in.k_cache, KvRole::k);
  check_cache(op, "v_cache", in.v_cache, KvRole::v);
  const KvShape &k = in.k_cache.shape, &v = in.v_cache.shape;
  require(k.kv_heads != 0, op, ": k_cache has no heads");
  require(v.kv_heads == k.kv_heads, op, ": v_cache must have the kv_heads of k_cache: ", k.kv_heads,
          ", got ", v.kv_heads);
  require(v.capacity == k.capacity, op, ": v_cache must have the capacity of k_cache: ", k.capacity,
          ", got ", v.capacity);
  if (in.latent) check_latent_shape(op, {k.format, v.format, k.kv_heads, k.head_dim, v.head_dim});
}

void check_options(const AttentionCall& call) {
  const uint64_t capacity = call.in.k_cache.shape.capacity, tokens = call.in.q.shape(0);
  if (call.state == nullptr) {
    require(call.options.length <= capacity, call.op, ": length must be at most the capacity ",
            capacity, ", got ", call.options.length);
    require(call.options.ring_start < std::max<uint64_t>(capacity, 1), call.op,
            ": ring_start must be below the capacity ", capacity, ", got ",
            call.options.ring_start);
  }
  if (call.in.latent) check_latent_options(call.op, call.options.scale, call.options.mask);
  checked_scale(call.op, call.options.scale, call.in.q.shape(2));
  check_mask(call.op, call.options.mask, call.in.q.shape(1));
  const Tensor& tree_mask = call.options.mask.tree_mask;
  if (!tree_mask.defined()) return;
  require(tree_mask.dtype() == DType::u8 && tree_mask.rank() == 2 && tree_mask.shape(0) == tokens &&
              tree_mask.shape(1) == tokens && (tree_mask.stride(1) == 1 || tokens == 1),
          call.op, ": tree_mask must be u8 [", tokens, ", ", tokens, "] with contiguous rows, got ",
          tree_mask.dtype(), " ", tree_mask.shape(), " with strides ", tree_mask.strides());
  require(call.state != nullptr || tokens <= call.options.length, call.op,
          ": with a tree_mask the queries must be in the cache: ", tokens, " queries, length ",
          call.options.length);
}

}  // namespace

void check_query(const char* op, const Tensor& q, const char* keys, uint64_t kv_heads,
                 uint64_t head_dim) {
  require(q.defined(), op, ": q is undefined");
  require(q.rank() == 3, op, ": q must be [tokens, heads, head_dim], got shape ", q.shape());
  require(is_float(q.dtype()), op, ": q must be f32, f16 or bf16, got ", q.dtype());
  require(q.shape(2) == head_dim, op, ": q must have the head_dim of ", keys, ": ", head_dim,
          ", got ", q.shape(2));
  require(q.stride(2) == 1, op, ": head_dim of q must be contiguous, got stride ", q.stride(2));
  require(q.shape(1) != 0 && q.shape(1) % kv_heads == 0, op,
          ": heads must be a multiple of kv_heads ", kv_heads, ", got ", q.shape(1));
  // Rows and tasks are counted in 64 bits from these.
  require(q.shape(0) <= uint64_t{1} << 32, op, ": at most 2^32 query tokens, got ", q.shape(0));
  require(q.shape(1) <= uint64_t{1} << 20, op, ": at most 2^20 heads, got ", q.shape(1));
}

float checked_scale(const char* op, std::optional<float> given, uint64_t head_dim) {
  constexpr float kLog2E = 1.44269504f;  // exponentials are to base 2
  const float scale = given.value_or(1.0f / std::sqrt(static_cast<float>(head_dim)));
  require(std::isfinite(scale * kLog2E), op, ": scale must be finite, times log2(e) as well, got ",
          scale);
  return scale;
}

void check_mask(const char* op, const AttentionMask& mask, uint64_t heads) {
  require(std::isfinite(mask.soft_cap) && mask.soft_cap >= 0, op,
          ": soft_cap must be finite and not negative, got ", mask.soft_cap);
  check_per_head(op, "alibi_slopes", mask.alibi_slopes, heads);
  check_per_head(op, "sink_logits", mask.sink_logits, heads);
}

void check_per_head(const char* op, const char* what, const Tensor& tensor, uint64_t heads) {
  if (!tensor.defined()) return;
  require(tensor.dtype() == DType::f32 && tensor.rank() == 1 && tensor.shape(0) == heads &&
              tensor.is_contiguous(),
          op, ": ", what, " must be contiguous f32 [", heads, "], got ", tensor.dtype(), " ",
          tensor.shape(), " with strides ", tensor.strides());
}

void check_call(const AttentionCall& call) {
  check_caches(call.op, call.in);
  check_query(call.op, call.in.q, call.in.latent ? "k_cache and v_cache" : "k_cache",
              call.in.k_cache.shape.kv_heads, row_dims(call.in).query);
  check_options(call);
}

void check_outputs(const char* op, const AttentionMergeInputs& in, const Dims& shape) {
  require(in.out.defined(), op, ": out is undefined");
  require(is_float(in.out.dtype()), op, ": out must be f32, f16 or bf16, got ", in.out.dtype());
  require(in.out.shape() == shape, op, ": out must have shape ", shape, ", got ", in.out.shape());
  require(in.out.stride(2) == 1, op, ": head_dim of out must be contiguous, got stride ",
          in.out.stride(2));
  require(in.out.is_injective(), op, ": strides ", in.out.strides(),
          " make elements of out share memory");
  check_per_head(op, "sink_logits", in.sink_logits, shape[1]);
  if (!in.lse.defined()) return;
  require(in.lse.dtype() == DType::f32 && in.lse.rank() == 2 && in.lse.shape(0) == shape[0] &&
              in.lse.shape(1) == shape[1],
          op, ": lse must be f32 [", shape[0], ", ", shape[1], "], got ", in.lse.dtype(), " ",
          in.lse.shape());
  require(in.lse.is_injective(), op, ": strides ", in.lse.strides(),
          " make elements of lse share memory");
  require(!may_overlap(in.lse, in.out), op, ": lse and out share memory");
}

void check_apart(const char* op, const char* what, const Tensor& written,
                 std::initializer_list<const Tensor*> read) {
  if (!written.defined()) return;
  for (const Tensor* tensor : read) {
    require(!tensor->defined() || !may_overlap(written, *tensor), op, ": ", what,
            " shares memory with an input");
  }
}

void check_scratch(const char* op, const Tensor* scratch) {
  if (scratch == nullptr || !scratch->defined()) return;
  constexpr const char* kRule =
      ": scratch must be an undefined tensor or what an earlier call made of it, contiguous f32 "
      "[entries] at a multiple of 16 bytes, got ";
  require(scratch->dtype() == DType::f32 && scratch->rank() == 1 && scratch->is_contiguous(), op,
          kRule, name(scratch->dtype()), " ", scratch->shape());
  require(scratch->address() % 16 == 0, op, kRule, "address ", scratch->address());
}

void check_partial_tensor(const char* op, const Tensor& partial) {
  require(partial.defined(), op, ": partial is undefined");
  require(partial.dtype() == DType::f32 && partial.rank() == 4 && partial.is_contiguous(), op,
          ": partial must be contiguous f32 [splits, tokens, heads, v_head_dim + 2], got ",
          partial.dtype(), " ", partial.shape(), " with strides ", partial.strides());
}

}  // namespace gyre
