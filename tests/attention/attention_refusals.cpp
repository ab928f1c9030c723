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

constexpr RefusedCall<AttentionCall> refuse_whole{
    "attention: ", good_call,
    [](Encoder& e, const AttentionCall& c) { attention(e, c.in, c.options); }};
constexpr RefusedCall<AttentionCall> refuse_partial{
    "attention_partial: ", good_call, [](Encoder& e, const AttentionCall& c) {
      attention_partial(e, {c.in.q, c.in.k_cache, c.in.v_cache, c.partial}, c.options);
    }};

// What one tensor gives another when both lie in `memory`.
Tensor piece(FilledTensors& t, const Tensor& memory, DType dtype, const Dims& shape) {
  return t.device().wrap(address_of(memory), dtype, shape);
}

using Place = void (*)(AttentionCall&, FilledTensors&, const Tensor& memory);

void place_out(AttentionCall& c, FilledTensors& t, const Tensor& memory) {
  c.in.out = piece(t, memory, DType::f32, {3, 4, 80});
}
void place_lse(AttentionCall& c, FilledTensors& t, const Tensor& memory) {
  c.in.lse = piece(t, memory, DType::f32, {3, 4});
}
void place_partial(AttentionCall& c, FilledTensors& t, const Tensor& memory) {
  c.partial = piece(t, memory, DType::f32, {2, 3, 4, 82});
}

// An input in the memory of what is written.
template <Place kPlace>
Tensor shared(AttentionCall& c, FilledTensors& t, DType dtype, const Dims& shape) {
  const Tensor memory = t.make(DType::u8, {16384});
  kPlace(c, t, memory);
  return piece(t, memory, dtype, shape);
}

template <Place kPlace>
std::vector<Rule> overlap_rules(const char* message) {
  return {
      Rule("written is q", {message},
           CHANGE(c.in.q = shared<kPlace>(c, t, DType::f32, {3, 4, 64}))),
      Rule("written is k's codes", {message},
           CHANGE(c.in.k_cache.codes = shared<kPlace>(c, t, DType::u8, {2, 16, 32}))),
      Rule("written is k's scales", {message},
           CHANGE(c.in.k_cache.scales =
                      shared<kPlace>(c, t, DType::u8, kv_scales_shape(c.in.k_cache.shape)))),
      Rule("written is v's codes", {message},
           CHANGE(c.in.v_cache.codes = shared<kPlace>(c, t, DType::f16, {2, 9, 80}))),
      Rule("written is v's scales", {message},
           CHANGE(c.in.v_cache = make_cache(t, {KvFormat::tq3, KvRole::v, 2, 9, 80}),
                  c.in.v_cache.scales =
                      shared<kPlace>(c, t, DType::u8, kv_scales_shape(c.in.v_cache.shape)))),
      Rule("written is alibi_slopes", {message},
           CHANGE(c.options.mask.alibi_slopes = shared<kPlace>(c, t, DType::f32, {4}))),
      Rule("written is tree_mask", {message},
           CHANGE(c.options.mask.tree_mask = shared<kPlace>(c, t, DType::u8, {3, 3}))),
  };
}

std::vector<Rule> output_rules() {
  return {
      Rule("no out", {"out is undefined"}, CHANGE(c.in.out = {})),
      Rule("out of u8", {"out must be f32, f16 or bf16", "got u8"},
           CHANGE(c.in.out = t.make(DType::u8, {3, 4, 80}))),
      Rule("out with K's head_dim", {"out must have shape [3, 4, 80]", "got [3, 4, 64]"},
           CHANGE(c.in.out = t.make(DType::f32, {3, 4, 64}))),
      Rule("out with gaps", {"head_dim of out must be contiguous", "stride 2"},
           CHANGE(c.in.out = t.make(DType::f32, {1920}).strided({3, 4, 80}, {640, 160, 2}))),
      Rule("heads of out in one place", {"strides [320, 0, 1] make elements of out share memory"},
           CHANGE(c.in.out = c.in.out.strided({3, 4, 80}, {320, 0, 1}))),
      Rule("sink_logits of another size", {"sink_logits must be contiguous f32 [4]", "got f32 [5]"},
           CHANGE(c.options.mask.sink_logits = t.make(DType::f32, {5}))),
      Rule("sink_logits of another dtype", {"sink_logits must be contiguous f32 [4]", "got bf16"},
           CHANGE(c.options.mask.sink_logits = t.make(DType::bf16, {4}))),
      Rule("lse of another dtype", {"lse must be f32 [3, 4]", "got f16"},
           CHANGE(c.in.lse = t.make(DType::f16, {3, 4}))),
      Rule("lse of other sizes", {"lse must be f32 [3, 4]", "got f32 [4, 3]"},
           CHANGE(c.in.lse = t.make(DType::f32, {4, 3}))),
      Rule("lse in one place", {"strides [0, 1] make elements of lse share memory"},
           CHANGE(c.in.lse = c.in.lse.strided({3, 4}, {0, 1}))),
      Rule("lse in out", {"lse and out share memory"},
           CHANGE(c.in.lse = c.in.out.strided({3, 4}, {4, 1}, 948))),
      Rule("out is sink_logits", {"out shares memory with an input"},
           CHANGE(c.options.mask.sink_logits = c.in.out.strided({4}, {1}, 956))),
      Rule("lse is sink_logits", {"lse shares memory with an input"},
           CHANGE(c.options.mask.sink_logits = c.in.lse.strided({4}, {1}, 8))),
      Rule("read-only out", {"out is written", "read-only"},
           CHANGE(c.in.out = read_only(t.device(), c.in.out))),
      Rule("read-only lse", {"lse is written", "read-only"},
           CHANGE(c.in.lse = read_only(t.device(), c.in.lse))),
      Rule("out of another device", {"out lives on another device"},
           CHANGE(c.in.out = on_another_device(DType::f32, {3, 4, 80}))),
  };
}

std::vector<Rule> partial_rules() {
  return {
      Rule("no partial", {"partial is undefined"}, CHANGE(c.partial = {})),
      Rule("no splits", {"partial must have shape [1, 3, 4, 82]", "got [0, 3, 4, 82]"},
           CHANGE(c.partial = c.partial.slice(0, 0, 0))),
      Rule("partial of f16", {"partial must be contiguous f32", "got f16"},
           CHANGE(c.partial = t.make(DType::f16, {2, 3, 4, 82}))),
      Rule("partial of rank 3",
           {"partial must be contiguous f32 [splits, tokens, heads, v_head_dim + 2]", "[6, 4, 82]"},
           CHANGE(c.partial = c.partial.reshape({6, 4, 82}))),
      Rule("partial with gaps", {"partial must be contiguous", "strides [984, 328, 82, 1]"},
           CHANGE(c.partial = c.partial.slice(1, 0, 2))),
      Rule("tokens of partial", {"partial must have shape [2, 3, 4, 82]", "got [2, 2, 4, 82]"},
           CHANGE(c.partial = t.make(DType::f32, {2, 2, 4, 82}))),
      Rule("partial without room for the state",
           {"partial must have shape [2, 3, 4, 82]", "got [2, 3, 4, 80]"},
           CHANGE(c.partial = t.make(DType::f32, {2, 3, 4, 80}))),
      Rule("read-only partial", {"partial is written", "read-only"},
           CHANGE(c.partial = read_only(t.device(), c.partial))),
  };
}

}  // namespace

std::vector<Refusal> attention_refusals() {
  return refuse_whole(concat({query_rules(), cache_rules(), option_rules(), output_rules(),
                              overlap_rules<place_out>("out shares memory with an input"),
                              overlap_rules<place_lse>("lse shares memory with an input")}));
}

std::vector<Refusal> attention_partial_refusals() {
  return refuse_partial(
      concat({query_rules(), cache_rules(), option_rules(), partial_rules(),
              overlap_rules<place_partial>("partial shares memory with an input")}));
}

}  // namespace gyre::test
