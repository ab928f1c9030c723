#include <limits>
#include <string>
#include <utility>

#include "format_classes.h"
#include "op_case.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

struct DecodeCall {
  KvDequantizeInputs inputs;
  KvDequantizeOptions options;
};

Refusal decode_refusal(std::string name, std::vector<std::string> message,
                       void (*change)(DecodeCall&, FilledTensors&)) {
  message.emplace_back("kv_dequantize");
  return {std::move(name), std::move(message), [change](Encoder& encoder, FilledTensors& tensors) {
            const KvShape shape{KvFormat::tq6, KvRole::v, 3, 9, 64};
            DecodeCall call{{{shape, tensors.make(DType::u8, kv_codes_shape(shape)),
                              tensors.make(DType::u8, kv_scales_shape(shape))},
                             tensors.make(DType::f32, {5, 3, 64})},
                            {}};
            change(call, tensors);
            kv_dequantize(encoder, call.inputs, call.options);
          }};
}

}  // namespace

std::vector<Refusal> kv_dequantize_refusals() {
  using C = DecodeCall;
  using T = FilledTensors;
  return {
      decode_refusal("one past the end", {"9 slots", "5 from slot 5"},
                     [](C& c, T&) { c.options.first_slot = 5; }),
      decode_refusal("into the rest of the tile", {"9 slots", "5 from slot 9"},
                     [](C& c, T&) { c.options.first_slot = 9; }),
      decode_refusal("sum wraps", {std::to_string(kHuge - 4)},
                     [](C& c, T&) { c.options.first_slot = kHuge - 4; }),
      decode_refusal("no out", {"out is undefined"}, [](C& c, T&) { c.inputs.out = {}; }),
      decode_refusal("out of u8", {"out must be f32, f16 or bf16", "u8"},
                     [](C& c, T& t) {
                       c.inputs.out = t.make(DType::u8, {5, 3, 64});
                     }),
      decode_refusal("kv_heads of out", {"kv_heads 3", "got 2"},
                     [](C& c, T&) { c.inputs.out = c.inputs.out.slice(1, 0, 2); }),
      decode_refusal("head_dim of out", {"head_dim 64", "got 32"},
                     [](C& c, T&) { c.inputs.out = c.inputs.out.slice(2, 0, 32); }),
      decode_refusal("out with gaps", {"head_dim of out must be contiguous", "stride 2"},
                     [](C& c, T& t) {
                       c.inputs.out = t.make(DType::f32, {1920}).strided({5, 3, 64}, {384, 128, 2});
                     }),
      decode_refusal("rows of out in one place", {"share memory", "[0, 64, 1]"},
                     [](C& c, T&) {
                       c.inputs.out = c.inputs.out.strided({5, 3, 64}, {0, 64, 1});
                     }),
      decode_refusal("dense cache", {"must be compressed", "got bf16"},
                     [](C& c, T&) { c.inputs.cache.shape.format = KvFormat::bf16; }),
      decode_refusal("role mixed up", {"codes of cache", "[3, 16, 48]", "got", "[3, 2, 384]"},
                     [](C& c, T&) { c.inputs.cache.shape.role = KvRole::k; }),
      decode_refusal("read-only out", {"out", "read-only"},
                     [](C& c, T& t) {
                       const void* memory = address_of(c.inputs.out);
                       c.inputs.out = t.device().wrap(memory, DType::f32, {5, 3, 64});
                     }),
      decode_refusal("out in the cache", {"out and codes of cache share memory"},
                     [](C& c, T& t) {
                       const Tensor memory = t.make(DType::f32, {5, 3, 64});
                       c.inputs.out = t.device().wrap(address_of(memory), DType::f32, {5, 3, 64});
                       c.inputs.cache.codes = t.device().wrap(
                           static_cast<float*>(address_of(memory)) + 512, DType::u8, {3, 2, 384});
                     }),
      decode_refusal("unknown domain", {"6", "domain"},
                     [](C& c, T&) { c.options.domain = static_cast<KvDomain>(6); }),
  };
}

}  // namespace gyre::test
