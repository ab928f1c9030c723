#include <string>

#include "format_classes.h"
#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

struct DecodeCall {
  KvDequantizeInputs in;
  KvDequantizeOptions options;
};

DecodeCall good_call(FilledTensors& tensors) {
  const KvShape shape{KvFormat::tq6, KvRole::v, 3, 9, 64};
  return {{{shape, tensors.make(DType::u8, kv_codes_shape(shape)),
            tensors.make(DType::u8, kv_scales_shape(shape))},
           tensors.make(DType::f32, {5, 3, 64})},
          {}};
}

constexpr RefusedCall<DecodeCall> refusal{
    "kv_dequantize", good_call,
    [](Encoder& e, const DecodeCall& c) { kv_dequantize(e, c.in, c.options); }};

}  // namespace

std::vector<Refusal> kv_dequantize_refusals() {
  return {
      refusal("one past the end", {"9 slots", "5 from slot 5"}, CHANGE(c.options.first_slot = 5)),
      refusal("into the rest of the tile", {"9 slots", "5 from slot 9"},
              CHANGE(c.options.first_slot = 9)),
      refusal("sum wraps", {std::to_string(kHuge - 4)}, CHANGE(c.options.first_slot = kHuge - 4)),
      refusal("no out", {"out is undefined"}, CHANGE(c.in.out = {})),
      refusal("out of u8", {"out must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.out = t.make(DType::u8, {5, 3, 64}))),
      refusal("kv_heads of out", {"kv_heads 3", "got 2"},
              CHANGE(c.in.out = c.in.out.slice(1, 0, 2))),
      refusal("head_dim of out", {"head_dim 64", "got 32"},
              CHANGE(c.in.out = c.in.out.slice(2, 0, 32))),
      refusal("out with gaps", {"head_dim of out must be contiguous", "stride 2"},
              CHANGE(c.in.out = t.make(DType::f32, {1920}).strided({5, 3, 64}, {384, 128, 2}))),
      refusal("rows of out in one place", {"share memory", "[0, 64, 1]"},
              CHANGE(c.in.out = c.in.out.strided({5, 3, 64}, {0, 64, 1}))),
      refusal("dense cache", {"must be compressed", "got bf16"},
              CHANGE(c.in.cache.shape.format = KvFormat::bf16)),
      refusal("role mixed up", {"codes of cache", "[3, 16, 48]", "got", "[3, 2, 384]"},
              CHANGE(c.in.cache.shape.role = KvRole::k)),
      refusal("read-only out", {"out", "read-only"},
              CHANGE(c.in.out = read_only(t.device(), c.in.out))),
      refusal("out in the cache", {"out and codes of cache share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor memory = t.make(DType::f32, {5, 3, 64});
                c.in.out = t.device().wrap(address_of(memory), DType::f32, {5, 3, 64});
                c.in.cache.codes = t.device().wrap(static_cast<float*>(address_of(memory)) + 512,
                                                   DType::u8, {3, 2, 384});
              }),
      refusal("unknown domain", {"6", "domain"},
              CHANGE(c.options.domain = static_cast<KvDomain>(6))),
  };
}

}  // namespace gyre::test
