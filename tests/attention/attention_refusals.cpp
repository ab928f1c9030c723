#include <string>
#include <utility>

#include "attention/attention_rules.h"

namespace gyre::test {
namespace {

AttentionCall good_call(FilledTensors& t) {
  return {
      {.q = t.make(DType::f32, {3, 4, 64}),
       .k_cache = make_cache(t, {KvFormat::tq4, KvRole::k, 2, 9, 64}),
       .v_cache = make_cache(t, {KvFormat::f16, KvRole::v, 2, 9, 80}),
       .out = t.make(DType::f32, {3, 4, 80}),
       .lse = t.make(DType::f32, {3, 4})},
      {.length = 7,
       .ring_start = 8,
       .mask = {.alibi_slopes = t.make(DType::f32, {4}), .tree_mask = t.make(DType::u8, {3, 3})}},
      t.make(DType::f32, {2, 3, 4, 82})};
}

enum class Form : uint8_t { whole, partial };

Refusal refusal(Form form, std::string name, std::vector<std::string> message,
                AttentionChange change) {
  message.emplace_back(form == Form::whole ? "attention: " : "attention_partial: ");
  return {std::move(name), std::move(message),
          [change, form](Encoder& encoder, FilledTensors& tensors) {
            AttentionCall c = good_call(tensors);
            change(c, tensors);
            if (form == Form::whole) return attention(encoder, c.in, c.options);
            attention_partial(encoder, {c.in.q, c.in.k_cache, c.in.v_cache, c.partial}, c.options);
          }};
}

using C = AttentionCall;
using T = FilledTensors;

// What one tensor gives another when both lie in `memory`.
Tensor piece(T& t, const Tensor& memory, DType dtype, const Dims& shape) {
  return t.device().wrap(address_of(memory), dtype, shape);
}

// Puts the written tensor and each input in turn into the same memory.
template <class Written>
std::vector<AttentionRule> overlap_rules(const char* message, Written) {
  return {
      {"written is q",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.q = piece(t, memory, DType::f32, {3, 4, 64});
         Written::set(c, t, memory);
       }},
      {"written is k's codes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.k_cache.codes = piece(t, memory, DType::u8, {2, 16, 32});
         Written::set(c, t, memory);
       }},
      {"written is k's scales",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.k_cache.scales = piece(t, memory, DType::u8, kv_scales_shape(c.in.k_cache.shape));
         Written::set(c, t, memory);
       }},
      {"written is v's codes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.v_cache.codes = piece(t, memory, DType::f16, {2, 9, 80});
         Written::set(c, t, memory);
       }},
      {"written is v's scales",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 2, 9, 80});
         c.in.v_cache.scales = piece(t, memory, DType::u8, kv_scales_shape(c.in.v_cache.shape));
         Written::set(c, t, memory);
       }},
      {"written is alibi_slopes",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.options.mask.alibi_slopes = piece(t, memory, DType::f32, {4});
         Written::set(c, t, memory);
       }},
      {"written is tree_mask",
       {message},
       [](C& c, T& t) {
         const Tensor memory = t.make(DType::u8, {16384});
         c.options.mask.tree_mask = piece(t, memory, DType::u8, {3, 3});
         Written::set(c, t, memory);
       }},
  };
}

struct WriteOut {
  static void set(C& c, T& t, const Tensor& m) { c.in.out = piece(t, m, DType::f32, {3, 4, 80}); }
};
struct WriteLse {
  static void set(C& c, T& t, const Tensor& m) { c.in.lse = piece(t, m, DType::f32, {3, 4}); }
};
struct WritePartial {
  static void set(C& c, T& t, const Tensor& m) {
    c.partial = piece(t, m, DType::f32, {2, 3, 4, 82});
  }
};

std::vector<AttentionRule> output_rules() {
  return {
      {"no out", {"out is undefined"}, [](C& c, T&) { c.in.out = {}; }},
      {"out of u8",
       {"out must be f32, f16 or bf16", "got u8"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::u8, {3, 4, 80});
       }},
      {"out with K's head_dim",
       {"out must have shape [3, 4, 80]", "got [3, 4, 64]"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::f32, {3, 4, 64});
       }},
      {"out with gaps",
       {"head_dim of out must be contiguous", "stride 2"},
       [](C& c, T& t) {
         c.in.out = t.make(DType::f32, {1920}).strided({3, 4, 80}, {640, 160, 2});
       }},
      {"heads of out in one place",
       {"strides [320, 0, 1] make elements of out share memory"},
       [](C& c, T&) {
         c.in.out = c.in.out.strided({3, 4, 80}, {320, 0, 1});
       }},
      {"sink_logits of another size",
       {"sink_logits must be contiguous f32 [4]", "got f32 [5]"},
       [](C& c, T& t) { c.options.mask.sink_logits = t.make(DType::f32, {5}); }},
      {"sink_logits of another dtype",
       {"sink_logits must be contiguous f32 [4]", "got bf16"},
       [](C& c, T& t) { c.options.mask.sink_logits = t.make(DType::bf16, {4}); }},
      {"lse of another dtype",
       {"lse must be f32 [3, 4]", "got f16"},
       [](C& c, T& t) {
         c.in.lse = t.make(DType::f16, {3, 4});
       }},
      {"lse of other sizes",
       {"lse must be f32 [3, 4]", "got f32 [4, 3]"},
       [](C& c, T& t) {
         c.in.lse = t.make(DType::f32, {4, 3});
       }},
      {"lse in one place",
       {"strides [0, 1] make elements of lse share memory"},
       [](C& c, T&) {
         c.in.lse = c.in.lse.strided({3, 4}, {0, 1});
       }},
      {"lse in out",
       {"lse and out share memory"},
       [](C& c, T&) {
         c.in.lse = c.in.out.strided({3, 4}, {4, 1}, 948);
       }},
      {"out is sink_logits",
       {"out shares memory with an input"},
       [](C& c, T&) { c.options.mask.sink_logits = c.in.out.strided({4}, {1}, 956); }},
      {"lse is sink_logits",
       {"lse shares memory with an input"},
       [](C& c, T&) { c.options.mask.sink_logits = c.in.lse.strided({4}, {1}, 8); }},
      {"read-only out",
       {"out is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.in.out);
         c.in.out = t.device().wrap(memory, DType::f32, {3, 4, 80});
       }},
      {"read-only lse",
       {"lse is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.in.lse);
         c.in.lse = t.device().wrap(memory, DType::f32, {3, 4});
       }},
      {"out of another device",
       {"out lives on another device"},
       [](C& c, T&) {
         c.in.out = Device::open("cpu", {.threads = 1}).tensor(DType::f32, {3, 4, 80});
       }},
  };
}

std::vector<AttentionRule> partial_rules() {
  return {
      {"no partial", {"partial is undefined"}, [](C& c, T&) { c.partial = {}; }},
      {"no splits",
       {"partial must have shape [1, 3, 4, 82]", "got [0, 3, 4, 82]"},
       [](C& c, T&) { c.partial = c.partial.slice(0, 0, 0); }},
      {"partial of f16",
       {"partial must be contiguous f32", "got f16"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f16, {2, 3, 4, 82});
       }},
      {"partial of rank 3",
       {"partial must be contiguous f32 [splits, tokens, heads, v_head_dim + 2]", "[6, 4, 82]"},
       [](C& c, T&) {
         c.partial = c.partial.reshape({6, 4, 82});
       }},
      {"partial with gaps",
       {"partial must be contiguous", "strides [984, 328, 82, 1]"},
       [](C& c, T&) { c.partial = c.partial.slice(1, 0, 2); }},
      {"tokens of partial",
       {"partial must have shape [2, 3, 4, 82]", "got [2, 2, 4, 82]"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f32, {2, 2, 4, 82});
       }},
      {"partial without room for the state",
       {"partial must have shape [2, 3, 4, 82]", "got [2, 3, 4, 80]"},
       [](C& c, T& t) {
         c.partial = t.make(DType::f32, {2, 3, 4, 80});
       }},
      {"read-only partial",
       {"partial is written", "read-only"},
       [](C& c, T& t) {
         const void* memory = address_of(c.partial);
         c.partial = t.device().wrap(memory, DType::f32, {2, 3, 4, 82});
       }},
  };
}

std::vector<Refusal> made(Form form, const std::vector<std::vector<AttentionRule>>& lists) {
  std::vector<Refusal> all;
  for (const auto& list : lists) {
    for (const AttentionRule& rule : list)
      all.push_back(refusal(form, rule.name, rule.message, rule.change));
  }
  return all;
}

}  // namespace

std::vector<Refusal> attention_refusals() {
  return made(Form::whole, {query_rules(), cache_rules(), option_rules(), output_rules(),
                            overlap_rules("out shares memory with an input", WriteOut()),
                            overlap_rules("lse shares memory with an input", WriteLse())});
}

std::vector<Refusal> attention_partial_refusals() {
  return made(Form::partial,
              {query_rules(), cache_rules(), option_rules(), partial_rules(),
               overlap_rules("partial shares memory with an input", WritePartial())});
}

}  // namespace gyre::test
