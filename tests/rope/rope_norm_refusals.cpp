#include <cmath>

#include "rope/rope_refusal.h"

namespace gyre::test {
namespace {

struct NormCall {
  NormRopeInputs in;
  NormRopeOptions options;
};

NormCall with_norm(const RopeCall& call) {
  NormCall norm;
  norm.in.x = call.in.x;
  norm.in.positions = call.in.positions;
  norm.in.out = call.in.out;
  norm.in.k = call.in.k;
  norm.in.k_out = call.in.k_out;
  norm.in.frequencies = call.in.frequencies;
  norm.in.factors = call.in.factors;
  norm.options.rope = call.options;
  return norm;
}

NormCall good_call(FilledTensors& tensors) {
  NormCall call = with_norm(good_rope_call(tensors));
  call.in.weight = tensors.make(DType::f32, {8});
  call.in.k_weight = tensors.make(DType::f32, {8});
  call.in.second = tensors.make(DType::bf16, {5, 3, 8});
  call.in.k_second = tensors.make(DType::bf16, {5, 2, 8});
  return call;
}

constexpr RefusedCall<NormCall> refusal{
    "norm_rope: ", good_call, [](Encoder& e, const NormCall& c) { norm_rope(e, c.in, c.options); }};

std::vector<Refusal> shared_refusals() {
  constexpr RefusedCall<RopeCall> kRefusal{"norm_rope: ", good_rope_call,
                                           [](Encoder& e, const RopeCall& c) {
                                             const NormCall norm = with_norm(c);
                                             norm_rope(e, norm.in, norm.options);
                                           }};
  return kRefusal(all_rope_refusals());
}

std::vector<Refusal> number_refusals() {
  return {
      refusal("epsilon NaN", {"epsilon must be finite and not negative", "got nan"},
              CHANGE(c.options.epsilon = NAN)),
      refusal("negative epsilon", {"epsilon", "got -1e-06"}, CHANGE(c.options.epsilon = -1e-6f)),
      refusal("infinite epsilon", {"epsilon", "got inf"}, CHANGE(c.options.epsilon = HUGE_VALF)),
      refusal("weight_offset NaN", {"weight_offset must be finite", "got nan"},
              CHANGE(c.options.weight_offset = NAN)),
      refusal("infinite weight_offset", {"weight_offset must be finite", "got -inf"},
              CHANGE(c.options.weight_offset = -HUGE_VALF)),
  };
}

std::vector<Refusal> weight_refusals() {
  return {
      refusal("weight of another length", {"weight of x", "[head_dim] = [8]", "got [7]"},
              CHANGE(c.in.weight = c.in.weight.slice(0, 0, 7))),
      refusal("weight per head", {"weight of x", "[head_dim] = [8]", "got [3, 8]"},
              CHANGE(c.in.weight = t.make(DType::f32, {3, 8}))),
      refusal("weight of i32", {"weight of x must be f32, f16 or bf16", "i32"},
              CHANGE(c.in.weight = t.make(DType::i32, {8}))),
      refusal("weight with gaps", {"weight of x must be contiguous", "stride 2"},
              CHANGE(c.in.weight = t.make(DType::f32, {16}).strided({8}, {2}))),
      refusal("k_weight of another length", {"weight of k", "[head_dim] = [8]", "got [6]"},
              CHANGE(c.in.k_weight = t.make(DType::f32, {6}))),
      refusal("k_weight without k", {"k_weight or k_second is defined without k"},
              CHANGE(c.in.k = c.in.k_out = c.in.k_second = {})),
      refusal("weight in out", {"out and weight share memory"},
              CHANGE(c.in.out = t.make(DType::f32, {5, 3, 8}),
                     c.in.k_out = t.make(DType::f32, {5, 2, 8}),
                     c.in.weight = c.in.out.slice(0, 2, 1).reshape({24}).slice(0, 8, 8))),
  };
}

std::vector<Refusal> second_refusals() {
  return {
      refusal("second of u8", {"second of x must be f32, f16 or bf16", "u8"},
              CHANGE(c.in.second = t.make(DType::u8, {5, 3, 8}))),
      refusal("second with other heads", {"second of x", "[5, 3, 8]", "got [5, 2, 8]"},
              CHANGE(c.in.second = c.in.second.slice(1, 0, 2))),
      refusal("permuted shape of k_second", {"second of k", "[5, 2, 8]", "got [2, 5, 8]"},
              CHANGE(c.in.k_second = c.in.k_second.permute({1, 0, 2}))),
      refusal("head_dim of second with gaps", {"head_dim of the second of x", "stride 2"},
              CHANGE(c.in.second = t.make(DType::bf16, {240}).strided({5, 3, 8}, {48, 16, 2}))),
      refusal("heads of second in one place", {"second of x share memory", "[24, 0, 1]"},
              CHANGE(c.in.second = c.in.second.strided({5, 3, 8}, {24, 0, 1}))),
      refusal("k_second without k", {"k_weight or k_second is defined without k"},
              CHANGE(c.in.k = c.in.k_out = c.in.k_weight = {})),
      refusal("second is out", {"out and second share memory"},
              CHANGE(c.in.second = c.in.out, c.in.k_second = t.make(DType::f16, {5, 2, 8}))),
      refusal("second is x", {"x and second share memory"},
              CHANGE(c.in.second = c.in.x, c.in.k_second = t.make(DType::f32, {5, 2, 8}))),
      refusal("second is k_second", {"second and k_second share memory"},
              CHANGE(c.in.k_second = c.in.second.slice(1, 0, 2))),
      refusal("read-only second", {"second", "read-only"},
              CHANGE(c.in.second = read_only(t.device(), c.in.second))),
  };
}

}  // namespace

std::vector<Refusal> norm_rope_refusals() {
  return concat({shared_refusals(), number_refusals(), weight_refusals(), second_refusals()});
}

}  // namespace gyre::test
