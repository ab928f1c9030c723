#include "rope/rope_refusal.h"

namespace gyre::test {

RopeCall good_rope_call(FilledTensors& tensors) {
  RopeCall call;
  call.in.x = tensors.make(DType::f32, {5, 3, 8});
  call.in.positions = tensors.make(DType::i32, {5});
  call.in.out = tensors.make(DType::f16, {5, 3, 8});
  call.in.k = tensors.make(DType::f32, {5, 2, 8});
  call.in.k_out = tensors.make(DType::f16, {5, 2, 8});
  return call;
}

std::vector<Rule> rope_tensor_refusals() {
  return {
      Rule("no x", {"x is undefined"}, CHANGE(c.in.x = {})),
      Rule("no out", {"out of x is undefined"}, CHANGE(c.in.out = {})),
      Rule("k without k_out", {"out of k is undefined"}, CHANGE(c.in.k_out = {})),
      Rule("k_out without k", {"k_out is defined without k"}, CHANGE(c.in.k = {})),
      Rule("x of rank 2", {"x must be [tokens, heads, head_dim]", "[15, 8]"},
           CHANGE(c.in.x = c.in.x.reshape({15, 8}))),
      Rule("k of rank 4", {"k must be [tokens, heads, head_dim]", "[5, 2, 4, 2]"},
           CHANGE(c.in.k = c.in.k.reshape({5, 2, 4, 2}))),
      // One element everywhere: such shapes cost no memory.
      Rule("more tokens than can be counted", {"x must have fewer than 2^32 tokens", "4294967296"},
           CHANGE(c.in.x = c.in.x.strided({uint64_t{1} << 32, 3, 8}, {0, 8, 1}))),
      Rule("more heads than can be counted", {"k must have at most 2^20 heads", "1048577"},
           CHANGE(c.in.k = c.in.k.strided({5, (uint64_t{1} << 20) + 1, 8}, {0, 0, 1}))),
      Rule("out of rank 1", {"out of x", "[5, 3, 8]", "got [120]"},
           CHANGE(c.in.out = c.in.out.reshape({120}))),
      Rule("out with fewer tokens", {"out of x", "[5, 3, 8]", "got [4, 3, 8]"},
           CHANGE(c.in.out = c.in.out.slice(0, 0, 4))),
      Rule("out with other heads", {"out of x", "[5, 3, 8]", "got [5, 2, 8]"},
           CHANGE(c.in.out = c.in.out.slice(1, 0, 2))),
      Rule("out with another head_dim", {"out of x", "[5, 3, 8]", "got [5, 3, 6]"},
           CHANGE(c.in.out = c.in.out.slice(2, 0, 6))),
      Rule("k_out with other heads", {"out of k", "[5, 2, 8]", "got [5, 3, 8]"},
           CHANGE(c.in.k_out = t.make(DType::f16, {5, 3, 8}))),
      Rule("tokens of k", {"k must have the tokens of x", "5", "got 4"},
           CHANGE(c.in.k = c.in.k.slice(0, 0, 4), c.in.k_out = c.in.k_out.slice(0, 0, 4))),
      Rule("head_dim of k", {"k must have the head_dim of x", "8", "got 6"},
           CHANGE(c.in.k = c.in.k.slice(2, 0, 6), c.in.k_out = c.in.k_out.slice(2, 0, 6))),
      Rule("x of i32", {"x must be f32, f16 or bf16", "i32"},
           CHANGE(c.in.x = t.make(DType::i32, {5, 3, 8}))),
      Rule("out of u8", {"out of x must be f32, f16 or bf16", "u8"},
           CHANGE(c.in.out = t.make(DType::u8, {5, 3, 8}))),
      Rule("k of u32", {"k must be f32, f16 or bf16", "u32"},
           CHANGE(c.in.k = t.make(DType::u32, {5, 2, 8}))),
      Rule("k_out of i32", {"out of k must be f32, f16 or bf16", "i32"},
           CHANGE(c.in.k_out = t.make(DType::i32, {5, 2, 8}))),
      Rule("k of another dtype than x", {"k must have the dtype of x", "f32", "got bf16"},
           CHANGE(c.in.k = t.make(DType::bf16, {5, 2, 8}))),
      Rule("k_out of another dtype than out",
           {"k_out must have the dtype of out", "f16", "got f32"},
           CHANGE(c.in.k_out = t.make(DType::f32, {5, 2, 8}))),
  };
}

std::vector<Rule> rope_memory_refusals() {
  return {
      Rule("head_dim of x with gaps", {"head_dim of x must be contiguous", "stride 2"},
           CHANGE(c.in.x = t.make(DType::f32, {240}).strided({5, 3, 8}, {48, 16, 2}))),
      Rule("head_dim of out with gaps", {"head_dim of the out of x must be contiguous", "stride 3"},
           CHANGE(c.in.out = t.make(DType::f16, {360}).strided({5, 3, 8}, {72, 24, 3}))),
      Rule("head_dim of k_out across tokens", {"head_dim of the out of k", "stride 10"},
           CHANGE(c.in.k_out = t.make(DType::f16, {8, 5, 2}).permute({1, 2, 0}))),
      Rule("tokens of out in one place", {"out of x share memory", "[0, 8, 1]"},
           CHANGE(c.in.out = c.in.out.strided({5, 3, 8}, {0, 8, 1}))),
      Rule("overlapping heads of k_out", {"out of k share memory", "[16, 7, 1]"},
           CHANGE(c.in.k_out = c.in.k_out.strided({5, 2, 8}, {16, 7, 1}))),
      Rule("out one row further than x", {"x and out share memory"},
           [](auto& c, FilledTensors& t) {
             const Tensor rows = t.make(DType::f32, {6, 3, 8});
             c.in.x = rows.slice(0, 0, 5);
             c.in.out = rows.slice(0, 1, 5);
             c.in.k_out = t.make(DType::f32, {5, 2, 8});
           }),
      Rule("out in the place of x, head by head", {"x and out share memory"},
           CHANGE(c.in.out = c.in.x.strided({5, 3, 8}, {8, 40, 1}),
                  c.in.k_out = t.make(DType::f32, {5, 2, 8}))),
      Rule("out in the place of x, in another dtype", {"x and out share memory"},
           CHANGE(c.in.out = t.device().wrap(address_of(c.in.x), DType::f16, {5, 3, 8}))),
      Rule("out is k", {"out and k share memory"},
           CHANGE(c.in.k = c.in.out = t.make(DType::f32, {5, 3, 8}),
                  c.in.k_out = t.make(DType::f32, {5, 3, 8}))),
      Rule("out is k_out", {"out and k_out share memory"},
           CHANGE(c.in.k = t.make(DType::f32, {5, 3, 8}), c.in.k_out = c.in.out)),
      Rule("k_out starts in x", {"x and k_out share memory"},
           CHANGE(c.in.out = t.make(DType::f32, {5, 3, 8}), c.in.k_out = c.in.x.slice(1, 0, 2))),
      Rule("positions in out", {"out and positions share memory"},
           CHANGE(c.in.positions = t.device().wrap(address_of(c.in.out), DType::i32, {5}))),
      Rule("factors in k_out", {"k_out and factors share memory"},
           CHANGE(c.in.factors = t.device().wrap(address_of(c.in.k_out), DType::f32, {4}))),
      Rule("read-only out", {"out", "read-only"},
           CHANGE(c.in.out = read_only(t.device(), c.in.out))),
      Rule("read-only k_out", {"k_out", "read-only"},
           CHANGE(c.in.k_out = read_only(t.device(), c.in.k_out))),
      Rule("x of another device", {"x lives on another device"},
           CHANGE(c.in.x = on_another_device(DType::f32, {5, 3, 8}))),
      Rule("positions of another device", {"positions lives on another device"},
           CHANGE(c.in.positions = on_another_device(DType::i32, {5}))),
      Rule("frequencies of another device", {"frequencies lives on another device"},
           [](auto& c, FilledTensors&) {
             const double radians[] = {1, 2, 3, 4};
             c.in.frequencies = rope_table(Device::open("cpu", {.threads = 1}), radians);
           }),
  };
}

std::vector<Rule> rope_frequency_refusals() {
  return {
      Rule("too few frequencies", {"frequencies", "4 pairs", "got shape [3]"},
           CHANGE(c.in.frequencies = t.make(DType::f32, {3}))),
      Rule("a frequency per coordinate", {"frequencies", "4 pairs", "got shape [8]"},
           CHANGE(c.in.frequencies = t.make(DType::f32, {8}))),
      Rule("frequencies for all of head_dim", {"frequencies", "2 pairs", "got shape [4]"},
           CHANGE(c.options.rotary_dim = 4, c.in.frequencies = t.make(DType::f32, {4}))),
      Rule("frequencies of rank 2", {"frequencies", "4 pairs", "got shape [1, 4]"},
           CHANGE(c.in.frequencies = t.make(DType::f32, {1, 4}))),
      Rule("frequencies of f16", {"frequencies must be f32 or a table", "f16"},
           CHANGE(c.in.frequencies = t.make(DType::f16, {4}))),
      Rule("frequencies of i32", {"frequencies must be f32 or a table", "i32"},
           CHANGE(c.in.frequencies = t.make(DType::i32, {4, 2}))),
      Rule("frequencies with gaps", {"frequencies must be contiguous"},
           CHANGE(c.in.frequencies = t.make(DType::f32, {8}).strided({4}, {2}))),
      Rule("flat table", {"frequencies", "4 pairs", "got shape [8]"},
           CHANGE(c.in.frequencies = t.make(DType::u32, {8}))),
      Rule("table for other pairs", {"frequencies", "4 pairs", "got shape [5, 2]"},
           CHANGE(c.in.frequencies = t.make(DType::u32, {5, 2}))),
      Rule("table of three words", {"frequencies", "4 pairs", "got shape [4, 3]"},
           CHANGE(c.in.frequencies = t.make(DType::u32, {4, 3}))),
      Rule("transposed table", {"frequencies must be contiguous"},
           CHANGE(c.in.frequencies = t.make(DType::u32, {2, 4}).permute({1, 0}))),
      Rule("too few factors", {"factors", "[pairs] = [4]", "got [3]"},
           CHANGE(c.in.factors = t.make(DType::f32, {3}))),
      Rule("factors of rank 2", {"factors", "[pairs] = [4]", "got [4, 1]"},
           CHANGE(c.in.factors = t.make(DType::f32, {4, 1}))),
      Rule("factors of bf16", {"factors must be f32", "bf16"},
           CHANGE(c.in.factors = t.make(DType::bf16, {4}))),
      Rule("factors with gaps", {"factors must be contiguous"},
           CHANGE(c.in.factors = t.make(DType::f32, {8}).strided({4}, {2}))),
  };
}

std::vector<Rule> all_rope_refusals() {
  return concat({rope_dim_refusals(), rope_mode_refusals(), rope_position_refusals(),
                 rope_tensor_refusals(), rope_memory_refusals(), rope_frequency_refusals()});
}

std::vector<Refusal> rope_refusals() {
  constexpr RefusedCall<RopeCall> kRefusal{
      "rope: ", good_rope_call, [](Encoder& e, const RopeCall& c) { rope(e, c.in, c.options); }};
  return kRefusal(all_rope_refusals());
}

}  // namespace gyre::test
