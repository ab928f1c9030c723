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

std::vector<RopeRefusal> rope_tensor_refusals() {
  return {
      {"no x", {"x is undefined"}, [](RopeCall& c, FilledTensors&) { c.in.x = {}; }},
      {"no out", {"out of x is undefined"}, [](RopeCall& c, FilledTensors&) { c.in.out = {}; }},
      {"k without k_out",
       {"out of k is undefined"},
       [](RopeCall& c, FilledTensors&) { c.in.k_out = {}; }},
      {"k_out without k",
       {"k_out is defined without k"},
       [](RopeCall& c, FilledTensors&) { c.in.k = {}; }},
      {"x of rank 2",
       {"x must be [tokens, heads, head_dim]", "[15, 8]"},
       [](RopeCall& c, FilledTensors&) {
         c.in.x = c.in.x.reshape({15, 8});
       }},
      {"k of rank 4",
       {"k must be [tokens, heads, head_dim]", "[5, 2, 4, 2]"},
       [](RopeCall& c, FilledTensors&) {
         c.in.k = c.in.k.reshape({5, 2, 4, 2});
       }},
      {"out of rank 1",
       {"out of x", "[5, 3, 8]", "got [120]"},
       [](RopeCall& c, FilledTensors&) { c.in.out = c.in.out.reshape({120}); }},
      {"out with fewer tokens",
       {"out of x", "[5, 3, 8]", "got [4, 3, 8]"},
       [](RopeCall& c, FilledTensors&) { c.in.out = c.in.out.slice(0, 0, 4); }},
      {"out with other heads",
       {"out of x", "[5, 3, 8]", "got [5, 2, 8]"},
       [](RopeCall& c, FilledTensors&) { c.in.out = c.in.out.slice(1, 0, 2); }},
      {"out with another head_dim",
       {"out of x", "[5, 3, 8]", "got [5, 3, 6]"},
       [](RopeCall& c, FilledTensors&) { c.in.out = c.in.out.slice(2, 0, 6); }},
      {"k_out with other heads",
       {"out of k", "[5, 2, 8]", "got [5, 3, 8]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k_out = t.make(DType::f16, {5, 3, 8});
       }},
      {"tokens of k",
       {"k must have the tokens of x", "5", "got 4"},
       [](RopeCall& c, FilledTensors&) {
         c.in.k = c.in.k.slice(0, 0, 4);
         c.in.k_out = c.in.k_out.slice(0, 0, 4);
       }},
      {"head_dim of k",
       {"k must have the head_dim of x", "8", "got 6"},
       [](RopeCall& c, FilledTensors&) {
         c.in.k = c.in.k.slice(2, 0, 6);
         c.in.k_out = c.in.k_out.slice(2, 0, 6);
       }},
      {"x of i32",
       {"x must be f32, f16 or bf16", "i32"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.x = t.make(DType::i32, {5, 3, 8});
       }},
      {"out of u8",
       {"out of x must be f32, f16 or bf16", "u8"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.out = t.make(DType::u8, {5, 3, 8});
       }},
      {"k of u32",
       {"k must be f32, f16 or bf16", "u32"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k = t.make(DType::u32, {5, 2, 8});
       }},
      {"k_out of i32",
       {"out of k must be f32, f16 or bf16", "i32"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k_out = t.make(DType::i32, {5, 2, 8});
       }},
      {"k of another dtype than x",
       {"k must have the dtype of x", "f32", "got bf16"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k = t.make(DType::bf16, {5, 2, 8});
       }},
      {"k_out of another dtype than out",
       {"k_out must have the dtype of out", "f16", "got f32"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k_out = t.make(DType::f32, {5, 2, 8});
       }},
  };
}

std::vector<RopeRefusal> rope_memory_refusals() {
  return {
      {"head_dim of x with gaps",
       {"head_dim of x must be contiguous", "stride 2"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.x = t.make(DType::f32, {240}).strided({5, 3, 8}, {48, 16, 2});
       }},
      {"head_dim of out with gaps",
       {"head_dim of the out of x must be contiguous", "stride 3"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.out = t.make(DType::f16, {360}).strided({5, 3, 8}, {72, 24, 3});
       }},
      {"head_dim of k_out across tokens",
       {"head_dim of the out of k", "stride 10"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k_out = t.make(DType::f16, {8, 5, 2}).permute({1, 2, 0});
       }},
      {"tokens of out in one place",
       {"out of x share memory", "[0, 8, 1]"},
       [](RopeCall& c, FilledTensors&) {
         c.in.out = c.in.out.strided({5, 3, 8}, {0, 8, 1});
       }},
      {"overlapping heads of k_out",
       {"out of k share memory", "[16, 7, 1]"},
       [](RopeCall& c, FilledTensors&) {
         c.in.k_out = c.in.k_out.strided({5, 2, 8}, {16, 7, 1});
       }},
      {"out one row further than x",
       {"x and out share memory"},
       [](RopeCall& c, FilledTensors& t) {
         const Tensor rows = t.make(DType::f32, {6, 3, 8});
         c.in.x = rows.slice(0, 0, 5);
         c.in.out = rows.slice(0, 1, 5);
         c.in.k_out = t.make(DType::f32, {5, 2, 8});
       }},
      {"out in the place of x, head by head",
       {"x and out share memory"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.out = c.in.x.strided({5, 3, 8}, {8, 40, 1});
         c.in.k_out = t.make(DType::f32, {5, 2, 8});
       }},
      {"out in the place of x, in another dtype",
       {"x and out share memory"},
       [](RopeCall& c, FilledTensors& t) {
         void* memory = address_of(c.in.x);
         c.in.out = t.device().wrap(memory, DType::f16, {5, 3, 8});
       }},
      {"out is k",
       {"out and k share memory"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k = c.in.out = t.make(DType::f32, {5, 3, 8});
         c.in.k_out = t.make(DType::f32, {5, 3, 8});
       }},
      {"out is k_out",
       {"out and k_out share memory"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.k = t.make(DType::f32, {5, 3, 8});
         c.in.k_out = c.in.out;
       }},
      {"k_out starts in x",
       {"x and k_out share memory"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.out = t.make(DType::f32, {5, 3, 8});
         c.in.k_out = c.in.x.slice(1, 0, 2);
       }},
      {"positions in out",
       {"out and positions share memory"},
       [](RopeCall& c, FilledTensors& t) {
         void* memory = address_of(c.in.out);
         c.in.positions = t.device().wrap(memory, DType::i32, {5});
       }},
      {"factors in k_out",
       {"k_out and factors share memory"},
       [](RopeCall& c, FilledTensors& t) {
         void* memory = address_of(c.in.k_out);
         c.in.factors = t.device().wrap(memory, DType::f32, {4});
       }},
      {"read-only out",
       {"out", "read-only"},
       [](RopeCall& c, FilledTensors& t) {
         const void* memory = address_of(c.in.out);
         c.in.out = t.device().wrap(memory, DType::f16, {5, 3, 8});
       }},
      {"read-only k_out",
       {"k_out", "read-only"},
       [](RopeCall& c, FilledTensors& t) {
         const void* memory = address_of(c.in.k_out);
         c.in.k_out = t.device().wrap(memory, DType::f16, {5, 2, 8});
       }},
      {"x of another device",
       {"x lives on another device"},
       [](RopeCall& c, FilledTensors&) {
         c.in.x = Device::open("cpu", {.threads = 1}).tensor(DType::f32, {5, 3, 8});
       }},
      {"positions of another device",
       {"positions lives on another device"},
       [](RopeCall& c, FilledTensors&) {
         c.in.positions = Device::open("cpu", {.threads = 1}).tensor(DType::i32, {5});
       }},
      {"frequencies of another device",
       {"frequencies lives on another device"},
       [](RopeCall& c, FilledTensors&) {
         const double radians[] = {1, 2, 3, 4};
         c.in.frequencies = rope_table(Device::open("cpu", {.threads = 1}), radians);
       }},
  };
}

std::vector<RopeRefusal> rope_frequency_refusals() {
  return {
      {"too few frequencies",
       {"frequencies", "4 pairs", "got shape [3]"},
       [](RopeCall& c, FilledTensors& t) { c.in.frequencies = t.make(DType::f32, {3}); }},
      {"a frequency per coordinate",
       {"frequencies", "4 pairs", "got shape [8]"},
       [](RopeCall& c, FilledTensors& t) { c.in.frequencies = t.make(DType::f32, {8}); }},
      {"frequencies for all of head_dim",
       {"frequencies", "2 pairs", "got shape [4]"},
       [](RopeCall& c, FilledTensors& t) {
         c.options.rotary_dim = 4;
         c.in.frequencies = t.make(DType::f32, {4});
       }},
      {"frequencies of rank 2",
       {"frequencies", "4 pairs", "got shape [1, 4]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::f32, {1, 4});
       }},
      {"frequencies of f16",
       {"frequencies must be f32 or a table", "f16"},
       [](RopeCall& c, FilledTensors& t) { c.in.frequencies = t.make(DType::f16, {4}); }},
      {"frequencies of i32",
       {"frequencies must be f32 or a table", "i32"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::i32, {4, 2});
       }},
      {"frequencies with gaps",
       {"frequencies must be contiguous"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::f32, {8}).strided({4}, {2});
       }},
      {"flat table",
       {"frequencies", "4 pairs", "got shape [8]"},
       [](RopeCall& c, FilledTensors& t) { c.in.frequencies = t.make(DType::u32, {8}); }},
      {"table for other pairs",
       {"frequencies", "4 pairs", "got shape [5, 2]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::u32, {5, 2});
       }},
      {"table of three words",
       {"frequencies", "4 pairs", "got shape [4, 3]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::u32, {4, 3});
       }},
      {"transposed table",
       {"frequencies must be contiguous"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.frequencies = t.make(DType::u32, {2, 4}).permute({1, 0});
       }},
      {"too few factors",
       {"factors", "[pairs] = [4]", "got [3]"},
       [](RopeCall& c, FilledTensors& t) { c.in.factors = t.make(DType::f32, {3}); }},
      {"factors of rank 2",
       {"factors", "[pairs] = [4]", "got [4, 1]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.factors = t.make(DType::f32, {4, 1});
       }},
      {"factors of bf16",
       {"factors must be f32", "bf16"},
       [](RopeCall& c, FilledTensors& t) { c.in.factors = t.make(DType::bf16, {4}); }},
      {"factors with gaps",
       {"factors must be contiguous"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.factors = t.make(DType::f32, {8}).strided({4}, {2});
       }},
  };
}

std::vector<RopeRefusal> all_rope_refusals() {
  std::vector<RopeRefusal> all;
  for (const auto& list :
       {rope_dim_refusals(), rope_mode_refusals(), rope_position_refusals(), rope_tensor_refusals(),
        rope_memory_refusals(), rope_frequency_refusals()}) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

std::vector<Refusal> rope_refusals() {
  std::vector<Refusal> all;
  for (const RopeRefusal& r : all_rope_refusals()) {
    std::vector<std::string> message = r.message;
    message.emplace_back("rope: ");
    all.push_back({r.name, message, [r](Encoder& encoder, FilledTensors& tensors) {
                     RopeCall call = good_rope_call(tensors);
                     r.change(call, tensors);
                     rope(encoder, call.in, call.options);
                   }});
  }
  return all;
}

}  // namespace gyre::test
