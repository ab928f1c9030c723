#include <limits>
#include <string>
#include <utility>

#include "op_case.h"

namespace gyre::test {
namespace {

constexpr KvPageShape kShape{KvFormat::tq8, KvFormat::tq4, 2, 64, 80, 16};

// A call that would be fine; each refusal changes one thing about it.
struct Call {
  PagedAttentionInputs in;
  PagedAttentionOptions options;
};

Call good_call(FilledTensors& t) {
  return {{.q = t.make(DType::f32, {6, 4, 64}),
           .pages = {kShape, t.make(DType::u8, {5, kv_page_bytes(kShape)})},
           .page_table = t.make(DType::i32, {3, 4}),
           .lengths = t.make(DType::i32, {3}),
           .query_begin = t.make(DType::i32, {4}),
           .prompts = t.make(DType::u8, {3}),
           .out = t.make(DType::f32, {6, 4, 80}),
           .lse = t.make(DType::f32, {6, 4}),
           .sinks = t.make(DType::f32, {4}),
           .slopes = t.make(DType::f32, {4})},
          {.most_queries = 4, .most_length = 64}};
}

using Change = void (*)(Call&, FilledTensors&);
Refusal refusal(std::string name, std::vector<std::string> message, Change change) {
  message.emplace_back("attention: ");
  return {std::move(name), std::move(message), [change](Encoder& encoder, FilledTensors& t) {
            Call call = good_call(t);
            change(call, t);
            attention(encoder, call.in, call.options);
          }};
}

std::vector<Refusal> query_refusals() {
  return {
      refusal("no q", {"q is undefined"}, [](Call& c, FilledTensors&) { c.in.q = {}; }),
      refusal("q of rank 2", {"q must be [tokens, heads, head_dim]", "[6, 256]"},
              [](Call& c, FilledTensors& t) {
                c.in.q = t.make(DType::f32, {6, 256});
              }),
      refusal("q of u8", {"q must be f32, f16 or bf16", "u8"},
              [](Call& c, FilledTensors& t) {
                c.in.q = t.make(DType::u8, {6, 4, 64});
              }),
      refusal("head_dim of q", {"head_dim of pages: 64", "got 80"},
              [](Call& c, FilledTensors& t) {
                c.in.q = t.make(DType::f32, {6, 4, 80});
              }),
      refusal("heads of q", {"multiple of kv_heads 2", "got 3"},
              [](Call& c, FilledTensors& t) {
                c.in.q = t.make(DType::f32, {6, 3, 64});
              }),
      refusal("no pages", {"pages have no memory"},
              [](Call& c, FilledTensors&) { c.in.pages.bytes = {}; }),
      refusal("pages of another format", {"pages must be u8"},
              [](Call& c, FilledTensors&) { c.in.pages.shape.k = KvFormat::tq4; }),
      refusal("scale", {"scale must be finite", "inf"},
              [](Call& c, FilledTensors&) {
                c.options.scale = std::numeric_limits<float>::infinity();
              }),
      refusal("soft_cap", {"soft_cap must be finite and not negative", "-1"},
              [](Call& c, FilledTensors&) { c.options.soft_cap = -1; }),
      refusal("slopes", {"slopes must be contiguous f32 [4]", "[5]"},
              [](Call& c, FilledTensors& t) { c.in.slopes = t.make(DType::f32, {5}); }),
      refusal("sinks", {"sinks must be contiguous f32 [4]", "f16"},
              [](Call& c, FilledTensors& t) { c.in.sinks = t.make(DType::f16, {4}); }),
  };
}

std::vector<Refusal> table_refusals() {
  return {
      refusal("no table", {"page_table is undefined"},
              [](Call& c, FilledTensors&) { c.in.page_table = {}; }),
      refusal("table of i64", {"page_table must be i32 [sequences, width]", "i64"},
              [](Call& c, FilledTensors& t) {
                c.in.page_table = t.make(DType::i64, {3, 4});
              }),
      refusal("table of rank 1", {"page_table must be i32", "[12]"},
              [](Call& c, FilledTensors& t) { c.in.page_table = t.make(DType::i32, {12}); }),
      refusal("entries apart", {"entries of page_table must be contiguous", "[1, 3]"},
              [](Call& c, FilledTensors& t) {
                c.in.page_table = t.make(DType::i32, {4, 3}).permute({1, 0});
              }),
      refusal("no lengths", {"lengths is undefined"},
              [](Call& c, FilledTensors&) { c.in.lengths = {}; }),
      refusal("lengths of i64", {"lengths must be contiguous i32 [3]", "i64"},
              [](Call& c, FilledTensors& t) { c.in.lengths = t.make(DType::i64, {3}); }),
      refusal("too few lengths", {"lengths must be contiguous i32 [3]", "[2]"},
              [](Call& c, FilledTensors& t) { c.in.lengths = t.make(DType::i32, {2}); }),
      refusal("lengths apart", {"lengths must be contiguous", "strides [2]"},
              [](Call& c, FilledTensors& t) {
                c.in.lengths = t.make(DType::i32, {6}).strided({3}, {2});
              }),
      refusal("no query_begin", {"query_begin is undefined"},
              [](Call& c, FilledTensors&) { c.in.query_begin = {}; }),
      refusal("too few ranges", {"query_begin must be contiguous i32 [4]", "[3]"},
              [](Call& c, FilledTensors& t) { c.in.query_begin = t.make(DType::i32, {3}); }),
      refusal("prompts of i32", {"prompts must be contiguous u8 [3]", "i32"},
              [](Call& c, FilledTensors& t) { c.in.prompts = t.make(DType::i32, {3}); }),
      refusal("too few marks", {"prompts must be contiguous u8 [3]", "[2]"},
              [](Call& c, FilledTensors& t) { c.in.prompts = t.make(DType::u8, {2}); }),
      refusal("longer than the table", {"most_length 65 needs 5 pages of 16", "rows of 4"},
              [](Call& c, FilledTensors&) { c.options.most_length = 65; }),
      refusal("length beyond 31 bits", {"most_length must be below 2^31", "2147483648"},
              [](Call& c, FilledTensors&) { c.options.most_length = uint64_t{1} << 31; }),
      refusal("no queries at most", {"most_queries must be from 1", "got 0"},
              [](Call& c, FilledTensors&) { c.options.most_queries = 0; }),
      refusal("queries beyond 31 bits", {"most_queries must be from 1 to 2^31 - 1"},
              [](Call& c, FilledTensors&) { c.options.most_queries = ~uint64_t{0}; }),
  };
}

std::vector<Refusal> output_refusals() {
  return {
      refusal("no out", {"out is undefined"}, [](Call& c, FilledTensors&) { c.in.out = {}; }),
      refusal("shape of out", {"out must have shape [6, 4, 80]", "[6, 4, 64]"},
              [](Call& c, FilledTensors& t) {
                c.in.out = t.make(DType::f32, {6, 4, 64});
              }),
      refusal("out that repeats", {"make elements of out share memory"},
              [](Call& c, FilledTensors& t) {
                c.in.out = t.make(DType::f32, {4, 80}).strided({6, 4, 80}, {0, 80, 1});
              }),
      refusal("lse", {"lse must be f32 [6, 4]", "[4, 6]"},
              [](Call& c, FilledTensors& t) {
                c.in.lse = t.make(DType::f32, {4, 6});
              }),
      refusal("out in q", {"out shares memory with an input"},
              [](Call& c, FilledTensors& t) {
                const Tensor both = t.make(DType::f32, {6 * 4 * 80});
                c.in.q = both.strided({6, 4, 64}, {256, 64, 1});
                c.in.out = both.reshape({6, 4, 80});
              }),
      refusal("lse over lengths", {"lse shares memory with an input"},
              [](Call& c, FilledTensors& t) {
                const Tensor memory = t.make(DType::i32, {6, 4});
                c.in.lengths = memory.strided({3}, {1});
                c.in.lse = t.device().wrap(address_of(memory), DType::f32, {6, 4});
              }),
  };
}

}  // namespace

std::vector<Refusal> paged_attention_refusals() {
  std::vector<Refusal> all = query_refusals();
  for (auto* list : {table_refusals, output_refusals}) {
    for (Refusal& r : list()) all.push_back(std::move(r));
  }
  return all;
}

}  // namespace gyre::test
