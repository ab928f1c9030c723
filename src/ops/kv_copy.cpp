#include <array>

#include "gyre/write.h"
#include "ops/kv_range.h"
#include "ops/table.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

abi::KvCopySpec make_spec(DType source, DType cache) {
  // Put together in a register: bytes stored one by one and read back as eight cost a stall.
  return spec_from_key<abi::KvCopySpec>(static_cast<uint64_t>(source) | static_cast<uint64_t>(cache)
                                                                            << 8);
}

// One of K and V, with the names its messages use.
struct CopiedStream {
  const char* name;
  const char* cache_name;
  const Tensor& source;
  const Tensor& cache;
};

void check_types(const CopiedStream& s) {
  require(s.source.rank() == 3, "kv_copy: ", s.name,
          " must be [tokens, kv_heads, head_dim], got shape ", s.source.shape());
  require(s.cache.rank() == 3, "kv_copy: ", s.cache_name,
          " must be [capacity, kv_heads, head_dim], got shape ", s.cache.shape());
  require(is_float(s.source.dtype()), "kv_copy: ", s.name, " must be f32, f16 or bf16, got ",
          s.source.dtype());
  require(is_float(s.cache.dtype()), "kv_copy: ", s.cache_name, " must be f32, f16 or bf16, got ",
          s.cache.dtype());
}

void check_layout(const CopiedStream& s) {
  for (const uint32_t dim : {1u, 2u}) {
    require(s.source.shape(dim) == s.cache.shape(dim), "kv_copy: ", s.cache_name,
            dim == 1 ? " must have the kv_heads of " : " must have the head_dim of ", s.name, ": ",
            s.source.shape(dim), ", got ", s.cache.shape(dim));
  }
  const bool single = s.source.shape(2) == 1;
  require(single || s.source.stride(2) == 1, "kv_copy: head_dim of ", s.name,
          " must be contiguous, got stride ", s.source.stride(2));
  require(single || s.cache.stride(2) == 1, "kv_copy: head_dim of ", s.cache_name,
          " must be contiguous, got stride ", s.cache.stride(2));
  require(s.cache.is_injective(), "kv_copy: strides ", s.cache.strides(), " make slots of ",
          s.cache_name, " ", s.cache.shape(), " share memory");
}

void check_pair(const KvCopyInputs& in) {
  require(in.v.shape(0) == in.k.shape(0), "kv_copy: v must have the tokens of k: ", in.k.shape(0),
          ", got ", in.v.shape(0));
  require(in.v.shape(1) == in.k.shape(1), "kv_copy: v must have the kv_heads of k: ", in.k.shape(1),
          ", got ", in.v.shape(1));
  require(in.v_cache.shape(0) == in.k_cache.shape(0),
          "kv_copy: v_cache must have the capacity of k_cache: ", in.k_cache.shape(0), ", got ",
          in.v_cache.shape(0));
  require(in.v.dtype() == in.k.dtype(), "kv_copy: v must have the dtype of k: ", in.k.dtype(),
          ", got ", in.v.dtype());
  require(in.v_cache.dtype() == in.k_cache.dtype(),
          "kv_copy: v_cache must have the dtype of k_cache: ", in.k_cache.dtype(), ", got ",
          in.v_cache.dtype());
}

void check_inputs(const KvCopyInputs& in) {
  require(in.k.defined(), "kv_copy: k is undefined");
  require(in.k_cache.defined(), "kv_copy: k_cache is undefined");
  require(in.v.defined() == in.v_cache.defined(), "kv_copy: v and v_cache go together, only ",
          in.v.defined() ? "v" : "v_cache", " is defined");
  const CopiedStream k{"k", "k_cache", in.k, in.k_cache};
  const CopiedStream v{"v", "v_cache", in.v, in.v_cache};
  check_types(k);
  check_layout(k);
  if (!in.v.defined()) return;
  check_types(v);
  check_pair(in);
  check_layout(v);
}

// Tokens are copied in any order and by several threads: no source may change under the copy, and
// no slot may have two writers.
void check_overlap(const KvCopyInputs& in) {
  const auto disjoint = [](const Tensor& a, const Tensor& b, const char* what) {
    require(!may_overlap(a, b), "kv_copy: ", what, " share memory");
  };
  disjoint(in.k, in.k_cache, "k and k_cache");
  if (!in.v.defined()) return;
  disjoint(in.k, in.v_cache, "k and v_cache");
  disjoint(in.v, in.k_cache, "v and k_cache");
  disjoint(in.v, in.v_cache, "v and v_cache");
  disjoint(in.k_cache, in.v_cache, "k_cache and v_cache");
}

// Filled in place: a struct returned and copied right away is read before its stores have landed.
void fill_stream(const Tensor& source, const Tensor& cache, abi::KvCopyStream& stream) {
  const uint64_t source_unit = size_bytes(source.dtype());
  const uint64_t cache_unit = size_bytes(cache.dtype());
  stream.source_token_stride = source.stride(0) * source_unit;
  stream.source_head_stride = source.stride(1) * source_unit;
  stream.cache_slot_stride = cache.stride(0) * cache_unit;
  stream.cache_head_stride = cache.stride(1) * cache_unit;
  stream.row_elements = source.shape(2);
}

// All heads of a token lie one after another on both sides.
bool heads_are_one_row(const Tensor& source, const Tensor& cache) {
  return source.stride(1) == source.shape(2) && cache.stride(1) == source.shape(2);
}

}  // namespace

std::string kv_copy_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvCopyParams*>(params);
  return join("tokens=", p.tokens, " rows=", p.heads, "x", p.stream[0].row_elements,
              " streams=", p.streams, " slot=", p.first_slot, " capacity=", p.capacity);
}

std::span<const uint64_t> kv_copy_specs() {
  return spec_list([](auto add) {
    for (const DType in : kFloats) {
      for (const DType out : kFloats) add(make_spec(in, out));
    }
  });
}

bool supports(const Device& device, const KvCopyTypes& types) try {
  require(impl_of(device) != nullptr, "supports: the device was moved from");
  return impl_of(device)->has(kKvCopy.info, spec_key(make_spec(types.source, types.cache)));
} catch (const std::bad_alloc&) {
  out_of_memory("supports");
}

void kv_copy(Encoder& encoder, const KvCopyInputs& in, const KvRange& options) try {
  Recording recording(encoder, "kv_copy");
  check_inputs(in);
  const bool pair = in.v.defined();
  const bool nothing_k = in.k.shape(1) == 0 || in.k.shape(2) == 0;
  const bool nothing_v = !pair || in.v.shape(1) == 0 || in.v.shape(2) == 0;
  if (nothing_k && nothing_v) return;
  const uint64_t capacity = in.k_cache.shape(0);
  const KvSlotRange range = checked_kv_range("kv_copy", "k", in.k.shape(0), capacity, options);
  if (range.tokens == 0) return;
  check_overlap(in);

  abi::KvCopyParams params{};
  params.tokens = range.tokens;
  params.heads = in.k.shape(1);
  params.capacity = capacity;
  params.first_slot = range.first_slot;
  params.streams = pair ? 2 : 1;
  fill_stream(in.k, in.k_cache, params.stream[0]);
  if (pair) fill_stream(in.v, in.v_cache, params.stream[1]);
  if (heads_are_one_row(in.k, in.k_cache) && (!pair || heads_are_one_row(in.v, in.v_cache))) {
    for (abi::KvCopyStream& stream : params.stream) stream.row_elements *= params.heads;
    params.heads = 1;
  }
  const abi::KvCopySpec spec = make_spec(in.k.dtype(), in.k_cache.dtype());
  if (range.tokens == in.k.shape(0)) {
    recording.dispatch(kKvCopy, spec, params, {&in.k, &in.k_cache, &in.v, &in.v_cache});
  } else {
    const Tensor k_part = in.k.slice(0, range.first_token, range.tokens);
    const Tensor v_part = pair ? in.v.slice(0, range.first_token, range.tokens) : Tensor();
    recording.dispatch(kKvCopy, spec, params, {&k_part, &in.k_cache, &v_part, &in.v_cache});
  }
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_copy");
}

}  // namespace gyre
