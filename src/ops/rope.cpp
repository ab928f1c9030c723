#include "gyre/rope.h"

#include <array>

#include "ops/rope_check.h"
#include "ops/table.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_outputs(const RopeCall& call) {
  const Tensor& out = *call.x.out;
  const Tensor& k_out = *call.k.out;
  require(k_out.dtype() == out.dtype(), call.op,
          ": k_out must have the dtype of out: ", out.dtype(), ", got ", k_out.dtype());
}

void check_streams(const RopeCall& call) {
  const bool pair = call.k.x->defined();
  check_rope_side(call, call.x);
  require(pair || !call.k.out->defined(), call.op, ": k_out is defined without k");
  require(pair || (!has(call.k.weight) && !has(call.k.second)), call.op,
          ": k_weight or k_second is defined without k");
  if (!pair) return;
  check_rope_side(call, call.k);
  check_rope_sides(call);
  check_outputs(call);
}

void check_overlap(const RopeCall& call) {
  constexpr size_t kX = 0, kK = 4;
  check_rope_parts(call.op, std::array<RopePart, 11>{{{call.x.x, "x", false},
                                                      {call.x.out, "out", true, kX},
                                                      {call.x.second, "second", true},
                                                      {call.x.weight, "weight", false},
                                                      {call.k.x, "k", false},
                                                      {call.k.out, "k_out", true, kK},
                                                      {call.k.second, "k_second", true},
                                                      {call.k.weight, "k_weight", false},
                                                      {&call.positions, "positions", false},
                                                      {&call.frequencies, "frequencies", false},
                                                      {&call.factors, "factors", false}}});
}

void record(Encoder& encoder, const RopeCall& call) {
  Recording recording(encoder, call.op);
  check_streams(call);
  const bool pair = call.k.x->defined();
  const Tensor& x = *call.x.x;
  abi::RopeParams params{};
  params.tokens = x.shape(0);
  params.head_dim = x.shape(2);
  params.streams = pair ? 2 : 1;
  fill_rope_side(call.x, params.stream[0]);
  if (pair) fill_rope_side(call.k, params.stream[1]);
  const Tensor frequencies = fill_rope(encoder, call, params);
  check_overlap(call);
  recording.dispatch(kRope, rope_spec(x.dtype(), call.x.out->dtype(), call.adjacent(), call.norm),
                     params,
                     {&x, &call.positions, call.x.out, &frequencies, &call.factors, call.x.weight,
                      call.x.second, call.k.x, call.k.out, call.k.weight, call.k.second});
  recording.commit();
}

}  // namespace

std::string rope_shape(const void* params) {
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  return join("tokens=", p.tokens,
              " heads=", p.stream[0].heads + (p.streams == 2 ? p.stream[1].heads : 0),
              " head_dim=", p.head_dim, " pairs=", p.blocks * p.block_pairs, " mode=", p.mode);
}

std::span<const uint64_t> rope_specs() {
  return spec_list([](auto add) {
    for (uint32_t i = 0; i < 36; ++i)
      add(rope_spec(kFloats[i % 3], kFloats[i / 3 % 3], i / 9 % 2 == 1, i / 18 == 1));
  });
}

bool supports(const Device& device, const RopeTypes& types) try {
  require(impl_of(device) != nullptr, "supports: the device was moved from");
  return impl_of(device)->has(kRope.info, spec_key(rope_spec(types.x, types.out, false, false)));
} catch (const std::bad_alloc&) {
  out_of_memory("supports");
}

void rope(Encoder& encoder, const RopeInputs& in, const RopeOptions& options) try {
  record(encoder, {.op = "rope",
                   .x = {"x", &in.x, &in.out, nullptr, nullptr},
                   .k = {"k", &in.k, &in.k_out, nullptr, nullptr},
                   .positions = in.positions,
                   .frequencies = in.frequencies,
                   .factors = in.factors,
                   .rope = &options,
                   .norm = false,
                   .epsilon = 0,
                   .weight_offset = 0});
} catch (const std::bad_alloc&) {
  out_of_memory("rope");
}

void norm_rope(Encoder& encoder, const NormRopeInputs& in, const NormRopeOptions& options) try {
  check_norm("norm_rope", options.epsilon, options.weight_offset);
  record(encoder, {.op = "norm_rope",
                   .x = {"x", &in.x, &in.out, &in.weight, &in.second},
                   .k = {"k", &in.k, &in.k_out, &in.k_weight, &in.k_second},
                   .positions = in.positions,
                   .frequencies = in.frequencies,
                   .factors = in.factors,
                   .rope = options.rope ? &*options.rope : nullptr,
                   .norm = true,
                   .epsilon = options.epsilon,
                   .weight_offset = options.weight_offset});
} catch (const std::bad_alloc&) {
  out_of_memory("norm_rope");
}

}  // namespace gyre
