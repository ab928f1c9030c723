#include <limits>

#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr KvPageShape kShape{KvFormat::tq8, KvFormat::tq4, 2, 16, 24, 16};

struct Call {
  RopeAppendInputs in;
  KvSlots to;
  RopeAppendOptions options;
};

KvPages make_pages(FilledTensors& t, const KvPageShape& shape = kShape) {
  return {shape, t.make(DType::u8, {5, kv_page_bytes(shape)})};
}

Call good_call(FilledTensors& t) {
  Call call;
  call.in.q = t.make(DType::f32, {6, 3, 16});
  call.in.q_out = t.make(DType::f32, {6, 3, 16});
  call.in.k = t.make(DType::f32, {6, 2, 16});
  call.in.v = t.make(DType::f32, {6, 2, 24});
  call.in.positions = t.make(DType::i32, {6});
  call.to = {make_pages(t), t.make(DType::i64, {6})};
  return call;
}

constexpr RefusedCall<Call> refusal{"rope_append: ", good_call, [](Encoder& e, const Call& c) {
                                      rope_append(e, c.in, c.to, c.options);
                                    }};

std::vector<Refusal> tensor_refusals() {
  return {
      refusal("no k", {"k is undefined"}, CHANGE(c.in.k = {})),
      refusal("no v", {"v is undefined"}, CHANGE(c.in.v = {})),
      refusal("no tokens", {"at least one token", "got 0"}, CHANGE(c.in.k = c.in.k.slice(0, 0, 0))),
      refusal("no positions", {"positions are undefined"}, CHANGE(c.in.positions = {})),
      refusal("positions of other tokens", {"positions must be [tokens] = [6]", "[5]"},
              CHANGE(c.in.positions = t.make(DType::i32, {5}))),
      refusal("q without an output", {"out of q is undefined"}, CHANGE(c.in.q_out = {})),
      refusal("an output without q", {"q_out or q_weight is defined without q"},
              CHANGE(c.in.q = {})),
      refusal("q of other tokens", {"k must have the tokens of q: 5", "got 6"},
              CHANGE(c.in.q = c.in.q.slice(0, 0, 5), c.in.q_out = c.in.q_out.slice(0, 0, 5))),
      refusal("q of another head_dim", {"k must have the head_dim of q: 24", "got 16"},
              CHANGE(c.in.q = t.make(DType::f32, {6, 3, 24}),
                     c.in.q_out = t.make(DType::f32, {6, 3, 24}))),
      refusal("q of another dtype", {"k must have the dtype of q: f16", "got f32"},
              CHANGE(c.in.q = t.make(DType::f16, {6, 3, 16}),
                     c.in.q_out = t.make(DType::f16, {6, 3, 16}))),
      refusal("q_out of another dtype", {"q_out must have the dtype of q: f32", "got bf16"},
              CHANGE(c.in.q_out = t.make(DType::bf16, {6, 3, 16}))),
      refusal("v of another dtype", {"v must have the dtype of k: f32", "got f16"},
              CHANGE(c.in.v = t.make(DType::f16, {6, 2, 24}))),
      refusal("v of other tokens", {"v must have the tokens of k: 6", "got 5"},
              CHANGE(c.in.v = c.in.v.slice(0, 0, 5))),
      refusal("head_dim of v", {"v must have the cache's head_dim 24", "got 16"},
              CHANGE(c.in.v = t.make(DType::f32, {6, 2, 16}))),
      refusal("k of integers", {"k must be f32, f16 or bf16", "i32"},
              CHANGE(c.in.k = t.make(DType::i32, {6, 2, 16}))),
      refusal("k with gaps in a head", {"head_dim of k must be contiguous", "stride 2"},
              CHANGE(c.in.k = t.make(DType::f32, {6, 16, 2}).permute({0, 2, 1}))),
      refusal("q_out that overlaps itself", {"share memory"},
              CHANGE(c.in.q_out = t.make(DType::f32, {6, 48}).strided({6, 3, 16}, {0, 16, 1}))),
      refusal("q_out over k", {"q_out and k share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor all = t.make(DType::f32, {6, 4, 16});
                c.in.q_out = all.slice(1, 0, 3);
                c.in.k = all.slice(1, 2, 2);
              }),
      refusal("q_out over v", {"q_out and v share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor all = t.make(DType::f32, {6, 96});
                c.in.q_out = all.strided({6, 3, 16}, {96, 16, 1});
                c.in.v = all.strided({6, 2, 24}, {96, 24, 1}, 40);
              }),
      refusal("q_out over positions", {"q_out and positions share memory"},
              CHANGE(c.in.positions = t.device().wrap(address_of(c.in.q_out), DType::i32, {6}))),
      refusal(
          "q_out over the weight of k", {"q_out and k_weight share memory"},
          CHANGE(c.options.norm = gyre::RopeNorm{}, c.in.k_weight = c.in.q_out.strided({16}, {1}))),
      refusal("q shifted against q_out", {"q and q_out share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor all = t.make(DType::f32, {7, 3, 16});
                c.in.q = all.slice(0, 0, 6);
                c.in.q_out = all.slice(0, 1, 6);
              }),
  };
}

std::vector<Refusal> target_refusals() {
  return {
      refusal("no pages", {"pages have no memory"}, CHANGE(c.to.pages.bytes = {})),
      refusal("no slots", {"slots is undefined"}, CHANGE(c.to.slots = {})),
      refusal("slots of floats", {"slots must be i64 or i32", "f32"},
              CHANGE(c.to.slots = t.make(DType::f32, {6}))),
      refusal("too few slots", {"slots must be contiguous [6]", "[5]"},
              CHANGE(c.to.slots = t.make(DType::i64, {5}))),
      refusal("kv_heads", {"kv_heads 2", "got 3"}, CHANGE(c.in.k = t.make(DType::f32, {6, 3, 16}))),
      refusal("q_out over the slots", {"q_out and slots share memory"},
              CHANGE(c.to.slots = t.device().wrap(address_of(c.in.q_out), DType::i64, {6}))),
      refusal("q_out in the pages", {"q_out and pages share memory"},
              [](auto& c, FilledTensors& t) {
                const uint64_t floats = kv_page_bytes(kShape) / 4;
                const Tensor all = t.make(DType::f32, {5, floats});
                c.in.q_out = all.strided({6, 3, 16}, {48, 16, 1});
                c.to.pages.bytes =
                    t.device().wrap(address_of(all), DType::u8, {5, kv_page_bytes(kShape)});
              }),
  };
}

std::vector<Refusal> option_refusals() {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  return {
      refusal("nothing to do", {"neither rope nor norm"}, CHANGE(c.options.rope = std::nullopt)),
      refusal("a weight without a norm", {"q_weight or k_weight is defined without a norm"},
              CHANGE(c.in.k_weight = t.make(DType::f32, {16}))),
      refusal("a weight of another size", {"the weight of k must be [head_dim] = [16]", "[24]"},
              CHANGE(c.options.norm = gyre::RopeNorm{}, c.in.k_weight = t.make(DType::f32, {24}))),
      refusal("epsilon", {"epsilon must be finite and not negative", "-1"},
              CHANGE(c.options.norm = gyre::RopeNorm{.epsilon = -1.0f})),
      refusal("weight_offset", {"weight_offset must be finite", "nan"},
              CHANGE(c.options.norm = gyre::RopeNorm{.weight_offset = kNaN})),
      refusal("rotary_dim", {"rotary_dim must be at most head_dim 16", "got 18"},
              CHANGE(c.options.rope->rotary_dim = 18)),
      refusal("frequencies of other pairs", {"one entry for each of 8 pairs", "[7]"},
              CHANGE(c.in.frequencies = t.make(DType::f32, {7}))),
      refusal("factors of other pairs", {"factors must be contiguous [pairs] = [8]", "[7]"},
              CHANGE(c.in.factors = t.make(DType::f32, {7}))),
  };
}

}  // namespace

std::vector<Refusal> rope_append_refusals() {
  return concat({tensor_refusals(), target_refusals(), option_refusals()});
}

}  // namespace gyre::test
