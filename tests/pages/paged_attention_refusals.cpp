#include <limits>

#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr KvPageShape kShape{KvFormat::tq8, KvFormat::tq4, 2, 64, 80, 16};

// A call that would be fine; each refusal changes one thing about it.
struct Call {
  PagedAttentionInputs in;
  PagedAttentionOptions options;
  Tensor scratch{};
};

Call good_call(FilledTensors& t) {
  return {
      {.q = t.make(DType::f32, {6, 4, 64}),
       .pages = {kShape, t.make(DType::u8, {5, kv_page_bytes(kShape)})},
       .page_table = t.make(DType::i32, {3, 4}),
       .kv_lengths = t.make(DType::i32, {3}),
       .cu_seqlens_q = t.make(DType::i32, {4}),
       .is_prefill = t.make(DType::u8, {3}),
       .out = t.make(DType::f32, {6, 4, 80}),
       .lse = t.make(DType::f32, {6, 4})},
      {.max_query_length = 4,
       .max_kv_length = 64,
       .mask = {.alibi_slopes = t.make(DType::f32, {4}), .sink_logits = t.make(DType::f32, {4})}}};
}

constexpr RefusedCall<Call> refusal{"attention: ", good_call, [](Encoder& e, const Call& c) {
                                      PagedAttentionInputs in = c.in;
                                      Tensor scratch = c.scratch;
                                      in.scratch = &scratch;
                                      attention(e, in, c.options);
                                    }};

std::vector<Refusal> query_refusals() {
  return {
      refusal("no q", {"q is undefined"}, CHANGE(c.in.q = {})),
      refusal("q of rank 2", {"q must be [tokens, heads, head_dim]", "[6, 256]"},
              CHANGE(c.in.q = t.make(DType::f32, {6, 256}))),
      refusal("q of u8", {"q must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.q = t.make(DType::u8, {6, 4, 64}))),
      refusal("head_dim of q", {"head_dim of pages: 64", "got 80"},
              CHANGE(c.in.q = t.make(DType::f32, {6, 4, 80}))),
      refusal("heads of q", {"multiple of kv_heads 2", "got 3"},
              CHANGE(c.in.q = t.make(DType::f32, {6, 3, 64}))),
      refusal("no pages", {"pages have no memory"}, CHANGE(c.in.pages.bytes = {})),
      refusal("pages of another format", {"pages must be u8"},
              CHANGE(c.in.pages.shape.k = KvFormat::tq4)),
      refusal("scale", {"scale must be finite", "inf"},
              CHANGE(c.options.scale = std::numeric_limits<float>::infinity())),
      refusal("soft_cap", {"soft_cap must be finite and not negative", "-1"},
              CHANGE(c.options.mask.soft_cap = -1)),
      refusal("alibi_slopes", {"alibi_slopes must be contiguous f32 [4]", "[5]"},
              CHANGE(c.options.mask.alibi_slopes = t.make(DType::f32, {5}))),
      refusal("sink_logits", {"sink_logits must be contiguous f32 [4]", "f16"},
              CHANGE(c.options.mask.sink_logits = t.make(DType::f16, {4}))),
      refusal("scratch of f16", {"scratch must be an undefined tensor", "f16 [64]"},
              CHANGE(c.scratch = t.make(DType::f16, {64}))),
      refusal("scratch of rank 2", {"contiguous f32 [entries]", "f32 [8, 8]"},
              CHANGE(c.scratch = t.make(DType::f32, {8, 8}))),
      refusal("a tree_mask", {"tree_mask is not supported over pages"},
              CHANGE(c.options.mask.tree_mask = t.make(DType::u8, {6, 6}))),
  };
}

std::vector<Refusal> table_refusals() {
  return {
      refusal("no table", {"page_table is undefined"}, CHANGE(c.in.page_table = {})),
      refusal("table of i64", {"page_table must be i32 [sequences, width]", "i64"},
              CHANGE(c.in.page_table = t.make(DType::i64, {3, 4}))),
      refusal("table of rank 1", {"page_table must be i32", "[12]"},
              CHANGE(c.in.page_table = t.make(DType::i32, {12}))),
      refusal("entries apart", {"entries of page_table must be contiguous", "[1, 3]"},
              CHANGE(c.in.page_table = t.make(DType::i32, {4, 3}).permute({1, 0}))),
      refusal("no kv_lengths", {"kv_lengths is undefined"}, CHANGE(c.in.kv_lengths = {})),
      refusal("kv_lengths of i64", {"kv_lengths must be contiguous i32 [3]", "i64"},
              CHANGE(c.in.kv_lengths = t.make(DType::i64, {3}))),
      refusal("too few kv_lengths", {"kv_lengths must be contiguous i32 [3]", "[2]"},
              CHANGE(c.in.kv_lengths = t.make(DType::i32, {2}))),
      refusal("kv_lengths apart", {"kv_lengths must be contiguous", "strides [2]"},
              CHANGE(c.in.kv_lengths = t.make(DType::i32, {6}).strided({3}, {2}))),
      refusal("no cu_seqlens_q", {"cu_seqlens_q is undefined"}, CHANGE(c.in.cu_seqlens_q = {})),
      refusal("too few ranges", {"cu_seqlens_q must be contiguous i32 [4]", "[3]"},
              CHANGE(c.in.cu_seqlens_q = t.make(DType::i32, {3}))),
      refusal("is_prefill of i32", {"is_prefill must be contiguous u8 [3]", "i32"},
              CHANGE(c.in.is_prefill = t.make(DType::i32, {3}))),
      refusal("too few marks", {"is_prefill must be contiguous u8 [3]", "[2]"},
              CHANGE(c.in.is_prefill = t.make(DType::u8, {2}))),
      refusal("longer than the table", {"max_kv_length 65 needs 5 pages of 16", "rows of 4"},
              CHANGE(c.options.max_kv_length = 65)),
      refusal("length beyond 31 bits", {"max_kv_length must be below 2^31", "2147483648"},
              CHANGE(c.options.max_kv_length = uint64_t{1} << 31)),
      refusal("no queries at most", {"max_query_length must be from 1", "got 0"},
              CHANGE(c.options.max_query_length = 0)),
      refusal("queries beyond 31 bits", {"max_query_length must be from 1 to 2^31 - 1"},
              CHANGE(c.options.max_query_length = ~uint64_t{0})),
  };
}

std::vector<Refusal> output_refusals() {
  return {
      refusal("no out", {"out is undefined"}, CHANGE(c.in.out = {})),
      refusal("shape of out", {"out must have shape [6, 4, 80]", "[6, 4, 64]"},
              CHANGE(c.in.out = t.make(DType::f32, {6, 4, 64}))),
      refusal("out that repeats", {"make elements of out share memory"},
              CHANGE(c.in.out = t.make(DType::f32, {4, 80}).strided({6, 4, 80}, {0, 80, 1}))),
      refusal("lse", {"lse must be f32 [6, 4]", "[4, 6]"},
              CHANGE(c.in.lse = t.make(DType::f32, {4, 6}))),
      refusal("out in q", {"out shares memory with an input"},
              [](auto& c, FilledTensors& t) {
                const Tensor both = t.make(DType::f32, {6 * 4 * 80});
                c.in.q = both.strided({6, 4, 64}, {256, 64, 1});
                c.in.out = both.reshape({6, 4, 80});
              }),
      refusal("lse over kv_lengths", {"lse shares memory with an input"},
              [](auto& c, FilledTensors& t) {
                const Tensor memory = t.make(DType::i32, {6, 4});
                c.in.kv_lengths = memory.strided({3}, {1});
                c.in.lse = t.device().wrap(address_of(memory), DType::f32, {6, 4});
              }),
  };
}

}  // namespace

std::vector<Refusal> paged_attention_refusals() {
  return concat({query_refusals(), table_refusals(), output_refusals()});
}

}  // namespace gyre::test
