#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHuge = ~uint64_t{0};

// A call that would be fine; each refusal changes one thing about it.
struct Call {
  KvCopyInputs in;
  KvRange options;
};

Call good_call(FilledTensors& tensors) {
  return {{.k = tensors.make(DType::f32, {5, 3, 8}),
           .k_cache = tensors.make(DType::f16, {9, 3, 8}),
           .v = tensors.make(DType::f32, {5, 3, 4}),
           .v_cache = tensors.make(DType::f16, {9, 3, 4})},
          {}};
}

constexpr RefusedCall<Call> refusal{"kv_copy", good_call,
                                    [](Encoder& e, const Call& c) { kv_copy(e, c.in, c.options); }};

std::vector<Refusal> shape_refusals() {
  return {
      refusal("no k", {"k is undefined"}, CHANGE(c.in.k = {})),
      refusal("no k_cache", {"k_cache is undefined"}, CHANGE(c.in.k_cache = {})),
      refusal("v alone", {"only v is"}, CHANGE(c.in.v_cache = {})),
      refusal("v_cache alone", {"only v_cache"}, CHANGE(c.in.v = {})),
      refusal("k of rank 2", {"k must be", "[15, 8]"}, CHANGE(c.in.k = c.in.k.reshape({15, 8}))),
      refusal("k_cache of rank 4", {"k_cache must be", "[9, 3, 4, 2]"},
              CHANGE(c.in.k_cache = c.in.k_cache.reshape({9, 3, 4, 2}))),
      refusal("v of rank 1", {"v must be", "[60]"}, CHANGE(c.in.v = c.in.v.reshape({60}))),
      refusal("v_cache of rank 2", {"v_cache must be", "[27, 4]"},
              CHANGE(c.in.v_cache = c.in.v_cache.reshape({27, 4}))),
      refusal("kv_heads of k_cache", {"k_cache", "kv_heads", "3", "got 2"},
              CHANGE(c.in.k_cache = c.in.k_cache.slice(1, 0, 2))),
      refusal("head_dim of k_cache", {"k_cache", "head_dim", "8", "got 7"},
              CHANGE(c.in.k_cache = c.in.k_cache.slice(2, 1, 7))),
      refusal("kv_heads of v_cache", {"v_cache", "kv_heads", "got 1"},
              CHANGE(c.in.v_cache = c.in.v_cache.slice(1, 0, 1))),
      refusal("head_dim of v_cache", {"v_cache", "head_dim", "got 3"},
              CHANGE(c.in.v_cache = c.in.v_cache.slice(2, 0, 3))),
      refusal("tokens of v", {"v must have the tokens of k", "5", "got 4"},
              CHANGE(c.in.v = c.in.v.slice(0, 0, 4))),
      refusal("kv_heads of v", {"v must have the kv_heads of k", "3", "got 2"},
              CHANGE(c.in.v = c.in.v.slice(1, 0, 2), c.in.v_cache = c.in.v_cache.slice(1, 0, 2))),
      refusal("capacity of v_cache", {"v_cache must have the capacity of k_cache", "9", "got 8"},
              CHANGE(c.in.v_cache = c.in.v_cache.slice(0, 1, 8))),
  };
}

std::vector<Refusal> dtype_refusals() {
  return {
      refusal("k of u8", {"k must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.k = t.make(DType::u8, {5, 3, 8}))),
      refusal("k_cache of i32", {"k_cache must be f32, f16 or bf16", "i32"},
              CHANGE(c.in.k_cache = t.make(DType::i32, {9, 3, 8}))),
      refusal("v of u32", {"v must be f32, f16 or bf16", "u32"},
              CHANGE(c.in.v = t.make(DType::u32, {5, 3, 4}))),
      refusal("v_cache of u8", {"v_cache must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.v_cache = t.make(DType::u8, {9, 3, 4}))),
      refusal("v of another dtype than k", {"v must have the dtype of k", "f32", "got bf16"},
              CHANGE(c.in.v = t.make(DType::bf16, {5, 3, 4}))),
      refusal("v_cache of another dtype",
              {"v_cache must have the dtype of k_cache", "f16", "got f32"},
              CHANGE(c.in.v_cache = t.make(DType::f32, {9, 3, 4}))),
  };
}

std::vector<Refusal> layout_refusals() {
  return {
      refusal("head_dim of k with gaps", {"head_dim of k must be contiguous", "stride 2"},
              CHANGE(c.in.k = t.make(DType::f32, {240}).strided({5, 3, 8}, {48, 16, 2}))),
      refusal("head_dim of k_cache with gaps",
              {"head_dim of k_cache must be contiguous", "stride 3"},
              CHANGE(c.in.k_cache = t.make(DType::f16, {648}).strided({9, 3, 8}, {72, 24, 3}))),
      refusal("slots of k_cache in one place", {"k_cache", "share memory", "[0, 8, 1]"},
              CHANGE(c.in.k_cache = c.in.k_cache.strided({9, 3, 8}, {0, 8, 1}))),
      refusal("overlapping heads of v_cache", {"v_cache", "share memory", "[12, 3, 1]"},
              CHANGE(c.in.v_cache = c.in.v_cache.strided({9, 3, 4}, {12, 3, 1}))),
      refusal("k_cache is v_cache", {"k_cache and v_cache share memory"},
              CHANGE(c.in.v = c.in.k, c.in.v_cache = c.in.k_cache)),
      refusal("v_cache starts in k_cache", {"k_cache and v_cache share memory"},
              [](auto& c, FilledTensors& t) {
                const Tensor both = t.make(DType::f16, {17, 3, 8});
                c.in.v = t.make(DType::f32, {5, 3, 8});
                c.in.k_cache = both.slice(0, 0, 9);
                c.in.v_cache = both.slice(0, 8, 9);
              }),
      refusal("k is part of k_cache", {"k and k_cache share memory"},
              CHANGE(c.in.k_cache = t.make(DType::f32, {9, 3, 8}),
                     c.in.v_cache = t.make(DType::f32, {9, 3, 4}),
                     c.in.k = c.in.k_cache.slice(0, 4, 5))),
      refusal("v is part of k_cache", {"v and k_cache share memory"},
              CHANGE(c.in.k_cache = t.make(DType::f32, {9, 3, 8}),
                     c.in.v_cache = t.make(DType::f32, {9, 3, 4}),
                     c.in.v = c.in.k_cache.slice(0, 2, 5).slice(2, 0, 4))),
      refusal("k is part of v_cache", {"k and v_cache share memory"},
              CHANGE(c.in.k_cache = t.make(DType::f32, {9, 3, 4}),
                     c.in.v_cache = t.make(DType::f32, {9, 3, 4}),
                     c.in.k = c.in.v_cache.slice(0, 0, 5))),
  };
}

std::vector<Refusal> memory_refusals() {
  return {
      refusal("read-only k_cache", {"k_cache", "read-only"},
              CHANGE(c.in.k_cache = read_only(t.device(), c.in.k_cache))),
      refusal("read-only v_cache", {"v_cache", "read-only"},
              CHANGE(c.in.v_cache = read_only(t.device(), c.in.v_cache))),
      refusal("v of another device", {"v lives on another device"},
              CHANGE(c.in.v = on_another_device(DType::f32, {5, 3, 4}))),
      refusal("k_cache of another device", {"k_cache lives on another device"},
              CHANGE(c.in.k_cache = on_another_device(DType::f16, {9, 3, 8}))),
  };
}

std::vector<Refusal> range_refusals() {
  return {
      refusal("source_begin past the end", {"source_begin", "5", "got 6"},
              CHANGE(c.options.source_begin = 6)),
      refusal("huge source_begin", {"source_begin", std::to_string(kHuge)},
              CHANGE(c.options.source_begin = kHuge)),
      refusal("too many tokens", {"5 tokens", "asked for 6"}, CHANGE(c.options.tokens = 6)),
      refusal("too many tokens from the middle", {"3 tokens from source_begin 2", "asked for 4"},
              CHANGE(c.options = {.source_begin = 2, .tokens = 4})),
      refusal("begin + tokens passes 2^64", {"asked for " + std::to_string(kHuge)},
              CHANGE(c.options = {.source_begin = 2, .tokens = kHuge})),
      refusal("no slots", {"capacity 0", "5 tokens"},
              CHANGE(c.in.k_cache = c.in.k_cache.slice(0, 0, 0),
                     c.in.v_cache = c.in.v_cache.slice(0, 0, 0))),
      refusal(
          "no slots on a ring", {"capacity 0"},
          CHANGE(c.in.k_cache = c.in.k_cache.slice(0, 3, 0),
                 c.in.v_cache = c.in.v_cache.slice(0, 3, 0), c.options.cache = CacheKind::ring)),
      refusal("linear: one past the end", {"9 slots", "5 tokens", "position 5"},
              CHANGE(c.options.position = 5)),
      refusal("linear: position at capacity", {"9 slots", "1 tokens", "position 9"},
              CHANGE(c.options = {.position = 9, .tokens = 1})),
      refusal("linear: position + tokens passes 2^64",
              {"9 slots", "position " + std::to_string(kHuge)}, CHANGE(c.options.position = kHuge)),
      refusal("linear: sum wraps to 0", {"position " + std::to_string(kHuge - 4)},
              CHANGE(c.options.position = kHuge - 4)),
      refusal("linear: more tokens than slots", {"4 slots", "5 tokens", "position 0"},
              CHANGE(c.in.k_cache = c.in.k_cache.slice(0, 0, 4),
                     c.in.v_cache = c.in.v_cache.slice(0, 0, 4))),
  };
}

}  // namespace

std::vector<Refusal> kv_copy_refusals() {
  return concat(
      {shape_refusals(), dtype_refusals(), layout_refusals(), memory_refusals(), range_refusals()});
}

}  // namespace gyre::test
