#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr KvPageShape kShape{KvFormat::tq8, KvFormat::tq4, 3, 64, 80, 16};

KvPages make_pages(FilledTensors& tensors, const KvPageShape& shape = kShape) {
  return {shape, tensors.make(DType::u8, {5, kv_page_bytes(shape)})};
}

using Write = KvWriteInputs;
using Copy = KvPageCopyInputs;

Write good_write(FilledTensors& t) {
  return {.k = t.make(DType::f32, {6, 3, 64}),
          .v = t.make(DType::f32, {6, 3, 80}),
          .pages = make_pages(t),
          .slots = t.make(DType::i64, {6})};
}

Copy good_copy(FilledTensors& t) {
  return {.pages = make_pages(t), .from = t.make(DType::i32, {2}), .to = t.make(DType::i32, {2})};
}

constexpr RefusedCall<Write> refusal{"kv_write", good_write,
                                     [](Encoder& e, const Write& c) { kv_write(e, c); }};

constexpr RefusedCall<Copy> copy_refusal{"kv_page_copy", good_copy,
                                         [](Encoder& e, const Copy& c) { kv_page_copy(e, c); }};

std::vector<Refusal> page_refusals() {
  return {
      refusal("no memory", {"pages have no memory"}, CHANGE(c.pages.bytes = {})),
      refusal("page_tokens 0", {"page_tokens", "multiple of 8", "got 0"},
              CHANGE(c.pages.shape.page_tokens = 0)),
      refusal("page_tokens 12", {"page_tokens", "got 12"}, CHANGE(c.pages.shape.page_tokens = 12)),
      refusal("page_tokens 1032", {"page_tokens", "1024", "got 1032"},
              CHANGE(c.pages.shape.page_tokens = 1032)),
      refusal("no heads", {"kv_heads must be given"}, CHANGE(c.pages.shape.kv_heads = 0)),
      refusal("head_dim 20", {"head dims must be multiples of 8", "got 20"},
              CHANGE(c.pages.shape.k = KvFormat::f16, c.pages.shape.head_dim = 20)),
      refusal("a head_dim that the format cannot store", {"mlx_native4", "got 80"},
              CHANGE(c.pages.shape.v = KvFormat::mlx_native4)),
      refusal("pages of another shape", {"pages must be u8 [pages, ", "got u8"},
              CHANGE(c.pages.shape.kv_heads = 2)),
      refusal("pages of another dtype", {"pages must be u8", "got f32"},
              CHANGE(c.pages.bytes = t.make(DType::f32, {5, kv_page_bytes(kShape)}))),
      refusal("pages that share memory", {"apart", "strides"},
              CHANGE(c.pages.bytes = c.pages.bytes.strided({3, kv_page_bytes(kShape)},
                                                           {kv_page_bytes(kShape) - 16, 1}))),
      refusal("a page stride of 8 more", {"multiple of 16", "strides"},
              CHANGE(c.pages.bytes = c.pages.bytes.strided({2, kv_page_bytes(kShape)},
                                                           {kv_page_bytes(kShape) + 8, 1}))),
      refusal("pages that begin between", {"begin at a multiple of 16"},
              CHANGE(c.pages.bytes = c.pages.bytes.strided({2, kv_page_bytes(kShape)},
                                                           {kv_page_bytes(kShape), 1}, 8))),
  };
}

std::vector<Refusal> token_refusals() {
  return {
      refusal("no k", {"k is undefined"}, CHANGE(c.k = {})),
      refusal("no v", {"v is undefined"}, CHANGE(c.v = {})),
      refusal("k of u8", {"k must be f32, f16 or bf16", "u8"},
              CHANGE(c.k = t.make(DType::u8, {6, 3, 64}))),
      refusal("k of rank 2", {"k must be [tokens, kv_heads, head_dim]", "[6, 192]"},
              CHANGE(c.k = t.make(DType::f32, {6, 192}))),
      refusal("kv_heads", {"kv_heads 3", "got 2"}, CHANGE(c.k = t.make(DType::f32, {6, 2, 64}))),
      refusal("head_dim of v", {"v must have", "head_dim 80", "got 64"},
              CHANGE(c.v = t.make(DType::f32, {6, 3, 64}))),
      refusal("head_dim with gaps", {"head_dim of k must be contiguous", "3"},
              CHANGE(c.k = t.make(DType::f32, {6, 64, 3}).permute({0, 2, 1}))),
      refusal("tokens of v", {"v must have the tokens of k: 6", "got 5"},
              CHANGE(c.v = t.make(DType::f32, {5, 3, 80}))),
      refusal("dtype of v", {"v must have the dtype of k: f32", "got f16"},
              CHANGE(c.v = t.make(DType::f16, {6, 3, 80}))),
      refusal("k in the pages", {"k and pages share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor both = t.make(DType::f32, {5, kv_page_bytes(kShape) / 4});
                c.k = both.strided({6, 3, 64}, {192, 64, 1});
                c.pages.bytes =
                    t.device().wrap(address_of(both), DType::u8, {5, kv_page_bytes(kShape)});
              }),
      refusal("no slots", {"slots is undefined"}, CHANGE(c.slots = {})),
      refusal("slots of u32", {"slots must be i64 or i32", "u32"},
              CHANGE(c.slots = t.make(DType::u32, {6}))),
      refusal("too few slots", {"slots must be contiguous [6]", "[5]"},
              CHANGE(c.slots = t.make(DType::i64, {5}))),
      refusal("slots with gaps", {"slots must be contiguous", "strides [2]"},
              CHANGE(c.slots = t.make(DType::i64, {12}).strided({6}, {2}))),
  };
}

}  // namespace

std::vector<Refusal> kv_write_refusals() { return concat({page_refusals(), token_refusals()}); }

std::vector<Refusal> kv_page_copy_refusals() {
  return {
      copy_refusal("no pages", {"pages have no memory"}, CHANGE(c.pages.bytes = {})),
      copy_refusal("no list", {"from is undefined"}, CHANGE(c.from = {})),
      copy_refusal("i64", {"to must be contiguous i32", "i64"},
                   CHANGE(c.to = t.make(DType::i64, {2}))),
      copy_refusal("different kv_lengths", {"as many pages as from: 2", "got 1"},
                   CHANGE(c.to = t.make(DType::i32, {1}))),
      copy_refusal("more pairs than pages", {"at most as many pairs as 5 pages", "got 6"},
                   CHANGE(c.from = t.make(DType::i32, {6}), c.to = t.make(DType::i32, {6}))),
      copy_refusal("a list with gaps", {"from must be contiguous", "strides [2]"},
                   CHANGE(c.from = t.make(DType::i32, {4}).strided({2}, {2}))),
  };
}

}  // namespace gyre::test
