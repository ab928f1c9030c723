#include "gyre/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "ops/attention_spec.h"
#include "ops/attention_way.h"
#include "ops/cache_ops.h"
#include "ops/kv_layout.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

struct Op {
  const char* name = nullptr;
  const AttentionPartialInputs& in;
  const AttentionOptions& options;
  const CacheState* state = nullptr;  // then length and ring_start are found on the device
};

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
}

void check_query(const char* op, const AttentionPartialInputs& in) {
  const KvShape& k = in.k_cache.shape;
  require(in.q.defined(), op, ": q is undefined");
  require(in.q.rank() == 3, op, ": q must be [tokens, heads, head_dim], got shape ", in.q.shape());
  require(is_float(in.q.dtype()), op, ": q must be f32, f16 or bf16, got ", in.q.dtype());
  require(in.q.shape(2) == k.head_dim, op, ": q must have the head_dim of k_cache: ", k.head_dim,
          ", got ", in.q.shape(2));
  require(in.q.stride(2) == 1, op, ": head_dim of q must be contiguous, got stride ",
          in.q.stride(2));
  require(in.q.shape(1) != 0 && in.q.shape(1) % k.kv_heads == 0, op,
          ": heads must be a multiple of kv_heads ", k.kv_heads, ", got ", in.q.shape(1));
  // Rows and tasks are counted in 64 bits from these.
  require(in.q.shape(0) <= uint64_t{1} << 32, op, ": at most 2^32 query tokens, got ",
          in.q.shape(0));
  require(in.q.shape(1) <= uint64_t{1} << 20, op, ": at most 2^20 heads, got ", in.q.shape(1));
}

void check_per_head(const char* op, const char* what, const Tensor& tensor, uint64_t heads) {
  if (!tensor.defined()) return;
  require(tensor.dtype() == DType::f32 && tensor.rank() == 1 && tensor.shape(0) == heads &&
              tensor.is_contiguous(),
          op, ": ", what, " must be contiguous f32 [", heads, "], got ", tensor.dtype(), " ",
          tensor.shape(), " with strides ", tensor.strides());
}

void check_options(const Op& o) {
  const uint64_t capacity = o.in.k_cache.shape.capacity, tokens = o.in.q.shape(0);
  if (o.state == nullptr) {
    require(o.options.length <= capacity, o.name, ": length must be at most the capacity ",
            capacity, ", got ", o.options.length);
    require(o.options.ring_start < std::max<uint64_t>(capacity, 1), o.name,
            ": ring_start must be below the capacity ", capacity, ", got ", o.options.ring_start);
  }
  require(std::isfinite(o.options.scale), o.name, ": scale must be finite, got ", o.options.scale);
  require(std::isfinite(o.options.soft_cap) && o.options.soft_cap >= 0, o.name,
          ": soft_cap must be finite and not negative, got ", o.options.soft_cap);
  check_per_head(o.name, "slopes", o.in.slopes, o.in.q.shape(1));
  if (!o.in.tree.defined()) return;
  const Tensor& tree = o.in.tree;
  require(tree.dtype() == DType::u8 && tree.rank() == 2 && tree.shape(0) == tokens &&
              tree.shape(1) == tokens && (tree.stride(1) == 1 || tokens == 1),
          o.name, ": tree must be u8 [", tokens, ", ", tokens, "] with contiguous rows, got ",
          tree.dtype(), " ", tree.shape(), " with strides ", tree.strides());
  require(o.state != nullptr || tokens <= o.options.length, o.name,
          ": with a tree the queries must be in the cache: ", tokens, " queries, length ",
          o.options.length);
}

void check_inputs(const Op& o) {
  check_caches(o.name, o.in);
  check_query(o.name, o.in);
  check_options(o);
}

// [tokens, heads, head_dim] and its [tokens, heads] companion.
void check_outputs(const char* op, const AttentionMergeInputs& in, const Dims& shape) {
  require(in.out.defined(), op, ": out is undefined");
  require(is_float(in.out.dtype()), op, ": out must be f32, f16 or bf16, got ", in.out.dtype());
  require(in.out.shape() == shape, op, ": out must have shape ", shape, ", got ", in.out.shape());
  require(in.out.stride(2) == 1, op, ": head_dim of out must be contiguous, got stride ",
          in.out.stride(2));
  require(in.out.is_injective(), op, ": strides ", in.out.strides(),
          " make elements of out share memory");
  check_per_head(op, "sinks", in.sinks, shape[1]);
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

void check_partial_tensor(const char* op, const Tensor& partial) {
  require(partial.defined(), op, ": partial is undefined");
  require(partial.dtype() == DType::f32 && partial.rank() == 4 && partial.is_contiguous(), op,
          ": partial must be contiguous f32 [splits, tokens, heads, v_head_dim + 2], got ",
          partial.dtype(), " ", partial.shape(), " with strides ", partial.strides());
}

uint64_t oldest_key(const Op& o) {
  return abi::attention_first_key(o.in.q.shape(0), o.options.length, o.options.window);
}

// Where the keys are: known now, or found on the device when the command runs.
void fill_keys(const Op& o, abi::AttentionParams& p) {
  if (o.state != nullptr) {
    p.places = o.state->places;
    p.segment = o.state->segment;
    const uint64_t before = p.segment == abi::kSegmentBody ? p.places.sinks % p.capacity : 0;
    p.ring_start = (p.capacity - before) % p.capacity;
    return;
  }
  p.length = p.end_key = o.options.length;
  p.ring_start = o.options.ring_start;
  p.first_key = oldest_key(o);
  const uint64_t keys = p.end_key - p.first_key;
  p.split_keys = abi::attention_split_keys(keys, p.splits);
  p.used_splits = keys == 0 ? 1 : static_cast<uint32_t>(ceil_div(keys, p.split_keys));
}

void dispatch(Recording& recording, const Op& o, const Way& way,
              const AttentionMergeInputs& outputs) {
  const AttentionPartialInputs& in = o.in;
  abi::AttentionParams p{};
  p.fewest_split_keys = recording.device().attention_fewest_keys;
  p.tokens = in.q.shape(0);
  p.heads = in.q.shape(1);
  p.kv_heads = in.k_cache.shape.kv_heads;
  p.group = static_cast<uint32_t>(p.heads / p.kv_heads);
  p.capacity = in.k_cache.shape.capacity;
  p.window = o.options.window;
  p.partial = way.partial;
  p.splits = way.splits;
  fill_keys(o, p);
  p.q_token_stride = in.q.stride(0) * size_bytes(in.q.dtype());
  p.q_head_stride = in.q.stride(1) * size_bytes(in.q.dtype());
  DType out_dtype = DType::f32;
  const bool direct = p.partial != abi::kAttentionPartial;
  if (direct) {
    out_dtype = outputs.out.dtype();
    p.out_token_stride = outputs.out.stride(0) * size_bytes(out_dtype);
    p.out_head_stride = outputs.out.stride(1) * size_bytes(out_dtype);
  }
  if (outputs.lse.defined() && direct) {
    p.lse_token_stride = outputs.lse.stride(0) * sizeof(float);
    p.lse_head_stride = outputs.lse.stride(1) * sizeof(float);
  }
  p.q_dtype = static_cast<uint32_t>(in.q.dtype());
  p.out_dtype = static_cast<uint32_t>(out_dtype);
  p.tree_stride = in.tree.defined() ? in.tree.stride(0) : 0;
  p.k = kv_cache_layout(in.k_cache);
  p.v = kv_cache_layout(in.v_cache);
  p.scale = o.options.scale;
  p.soft_cap = o.options.soft_cap;
  p.causal = o.options.causal && !in.tree.defined() ? 1 : 0;
  const Tensor none;
  const auto record = [&](const auto& kernel, const auto& spec) {
    recording.dispatch(kernel, spec, p,
                       {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes,
                        &in.v_cache.scales, direct ? &outputs.out : &none,
                        direct ? &outputs.lse : &none, direct ? &outputs.sinks : &none, &in.slopes,
                        &in.tree, &outputs.partial, o.state != nullptr ? &o.state->state : &none});
  };
  if (way.decode) {
    record(kAttentionDecode, *way.decode);
  } else {
    record(kAttention,
           make_spec(in.q.dtype(), in.k_cache.shape.format, in.v_cache.shape.format, out_dtype));
  }
}

uint64_t partial_floats(uint64_t splits, const AttentionPartialInputs& in) {
  return splits * in.q.shape(0) * in.q.shape(1) * (in.v_cache.shape.head_dim + 2);
}

void dispatch_merge(Recording& recording, const AttentionMergeInputs& in) {
  abi::AttentionMergeParams p{};
  p.splits = in.partial.shape(0);
  p.tokens = in.partial.shape(1);
  p.heads = in.partial.shape(2);
  p.head_dim = in.out.shape(2);
  p.out_token_stride = in.out.stride(0) * size_bytes(in.out.dtype());
  p.out_head_stride = in.out.stride(1) * size_bytes(in.out.dtype());
  if (in.lse.defined()) {
    p.lse_token_stride = in.lse.stride(0) * sizeof(float);
    p.lse_head_stride = in.lse.stride(1) * sizeof(float);
  }
  recording.dispatch(kAttentionMerge, make_merge_spec(in.out.dtype()), p,
                     {&in.partial, &in.out, &in.lse, &in.sinks});
}

}  // namespace

Dims attention_partial_shape(uint64_t splits, const Dims& q_shape, uint64_t v_head_dim) {
  require(splits != 0, "attention_partial_shape: at least one split");
  require(q_shape.size() == 3, "attention_partial_shape: q must be [tokens, heads, head_dim], got ",
          q_shape);
  require(v_head_dim <= abi::kKvMaxHeadDim, "attention_partial_shape: v_head_dim must be at most ",
          abi::kKvMaxHeadDim, ", got ", v_head_dim);
  return {splits, q_shape[0], q_shape[1], v_head_dim + 2};
}

bool Device::supports(const AttentionTypes& types) const {
  require(impl_ != nullptr, "device.supports: the handle was moved from");
  return impl_->pipeline(kAttention.info,
                         spec_key(make_spec(types.q, types.k, types.v, types.out))) != nullptr;
}

void attention_partial(Encoder& encoder, const AttentionPartialInputs& in,
                       const AttentionOptions& options) {
  Recording recording(encoder, "attention_partial");
  const Op o{"attention_partial", in, options};
  check_inputs(o);
  check_partial_tensor(o.name, in.partial);
  const Dims shape = attention_partial_shape(std::max<uint64_t>(in.partial.shape(0), 1),
                                             in.q.shape(), in.v_cache.shape.head_dim);
  require(in.partial.shape() == shape, o.name, ": partial must have shape ", shape, ", got ",
          in.partial.shape());
  check_apart(o.name, "partial", in.partial,
              {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes, &in.v_cache.scales,
               &in.slopes, &in.tree});
  if (in.q.shape(0) == 0) return;
  dispatch(recording, o, {decode_for(recording, in), abi::kAttentionPartial, in.partial.shape(0)},
           {.partial = in.partial, .out = {}, .lse = {}, .sinks = {}});
  recording.commit();
}

void attention_merge(Encoder& encoder, const AttentionMergeInputs& in) {
  Recording recording(encoder, "attention_merge");
  check_partial_tensor("attention_merge", in.partial);
  require(in.partial.shape(0) != 0, "attention_merge: partial has no splits");
  require(in.partial.shape(3) > 2 && in.partial.shape(3) - 2 <= abi::kKvMaxHeadDim,
          "attention_merge: partial must have v_head_dim + 2 entries a row, v_head_dim from 1 to ",
          abi::kKvMaxHeadDim, ", got ", in.partial.shape(3));
  check_outputs("attention_merge", in,
                {in.partial.shape(1), in.partial.shape(2), in.partial.shape(3) - 2});
  check_apart("attention_merge", "out", in.out, {&in.partial, &in.sinks});
  check_apart("attention_merge", "lse", in.lse, {&in.partial, &in.sinks});
  if (in.out.elements() == 0) return;
  dispatch_merge(recording, in);
  recording.commit();
}

void attention(Encoder& encoder, const AttentionInputs& in, const AttentionOptions& options) {
  Recording recording(encoder, "attention");
  const AttentionPartialInputs reads{in.q, in.k_cache, in.v_cache, {}, in.slopes, in.tree};
  const Op o{"attention", reads, options};
  check_inputs(o);
  AttentionMergeInputs outputs{{}, in.out, in.lse, in.sinks};
  check_outputs(o.name, outputs, {in.q.shape(0), in.q.shape(1), in.v_cache.shape.head_dim});
  for (const Tensor* written : {&in.out, &in.lse}) {
    check_apart(o.name, written == &in.out ? "out" : "lse", *written,
                {&in.q, &in.k_cache.codes, &in.k_cache.scales, &in.v_cache.codes,
                 &in.v_cache.scales, &in.sinks, &in.slopes, &in.tree});
  }
  if (in.q.shape(0) == 0) return;
  const uint64_t keys = options.length - oldest_key(o);
  if (const DecodeSpec decode = decode_for(recording, reads)) {
    const Way way = decode_way(recording, reads, *decode, keys);
    if (way.partial == abi::kAttentionMerged)
      outputs.partial = encoder.device().tensor(
          DType::f32, {abi::attention_counters(reads.k_cache.shape.kv_heads) +
                       partial_floats(way.splits, reads)});
    dispatch(recording, o, way, outputs);
    recording.commit();
    return;
  }
  const uint64_t splits = choose_splits(recording.device(), reads, keys);
  if (splits > 1) {
    outputs.partial = encoder.device().tensor(
        DType::f32, attention_partial_shape(splits, in.q.shape(), in.v_cache.shape.head_dim));
  }
  const uint32_t partial = splits > 1 ? abi::kAttentionPartial : abi::kAttentionWhole;
  dispatch(recording, o, {{}, partial, splits}, outputs);
  if (splits > 1) dispatch_merge(recording, outputs);
  recording.commit();
}

std::string describe_attention(const Device& device, KvFormat k, KvFormat v) {
  return device.impl()->describe(kAttention.info,
                                 spec_key(make_spec(DType::f32, k, v, DType::f32)));
}

void attend_cache(Encoder& encoder, const AttentionInputs& in, const AttentionOptions& options,
                  const CacheSegments& segments, Tensor& scratch) {
  const char* const op = "kv_cache.attend";
  Recording recording(encoder, op);
  const CacheSegment& body = segments.of[0];
  const AttentionPartialInputs reads{in.q, body.k, body.v, {}, in.slopes, in.tree};
  check_inputs({op, reads, options, &body.at});
  AttentionMergeInputs outputs{{}, in.out, in.lse, in.sinks};
  check_outputs(op, outputs, {in.q.shape(0), in.q.shape(1), body.v.shape.head_dim});
  for (const Tensor* written : {&in.out, &in.lse}) {
    check_apart(op, written == &in.out ? "out" : "lse", *written,
                {&in.q, &in.sinks, &in.slopes, &in.tree});
  }
  if (in.q.shape(0) == 0) return;
  const uint64_t capacity = body.k.shape.capacity;
  const DecodeSpec decode = decode_for(recording, reads);
  const bool merged = decode && segments.count == 1;
  Way body_way = {decode, abi::kAttentionPartial, 1};
  if (merged) {
    body_way = decode_way(recording, reads, *decode, capacity);
  } else {
    body_way.splits = decode ? decode_splits(recording.device(), reads, *decode, capacity)
                             : choose_splits(recording.device(), reads, capacity);
    if (body_way.splits == 1 && segments.count == 1) body_way.partial = abi::kAttentionWhole;
  }
  const bool leaves = body_way.partial != abi::kAttentionWhole;
  const uint64_t splits = body_way.splits + segments.count - 1;
  // Counters come first, whatever the layer: they must stay 0. Kept only when nothing is refused.
  const uint64_t first = abi::attention_counters(body.k.shape.kv_heads);
  Tensor partials = scratch;
  if (leaves) {
    const uint64_t floats = partial_floats(splits, reads);
    if (!partials.defined() || partials.elements() < first + floats)
      partials = encoder.device().tensor(DType::f32, {first + floats});
    outputs.partial =
        merged ? partials
               : partials.slice(0, first, floats)
                     .reshape(attention_partial_shape(splits, in.q.shape(), body.v.shape.head_dim));
  }
  for (uint32_t i = 0; i < segments.count; ++i) {
    const CacheSegment& segment = segments.of[i];
    const AttentionPartialInputs part{in.q, segment.k, segment.v, {}, in.slopes, in.tree};
    AttentionMergeInputs to = outputs;
    const Way way = i == 0 ? body_way : Way{decode_for(recording, part), abi::kAttentionPartial, 1};
    if (leaves && !merged)
      to.partial = outputs.partial.slice(0, i == 0 ? 0 : body_way.splits + i - 1, way.splits);
    dispatch(recording, {op, part, options, &segment.at}, way, to);
  }
  if (leaves && !merged) dispatch_merge(recording, outputs);
  recording.commit();
  scratch = std::move(partials);
}

}  // namespace gyre
