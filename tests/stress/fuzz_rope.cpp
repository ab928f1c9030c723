// Rotary positions, with norms and with what is stored behind them.
#include <cmath>

#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

constexpr std::array kModes = {RopeMode::plain,  RopeMode::plain,       RopeMode::sectioned,
                               RopeMode::vision, RopeMode::interleaved, RopeMode::vision_2d};

RopeOptions some_options(FuzzWorld& w, uint64_t dim) {
  FuzzInput& in = w.in;
  RopeOptions made;
  made.pairing = static_cast<RopePairing>(in.number(in.below(2)) & 0xFF);
  made.mode = in.spoil()     ? static_cast<RopeMode>(in.byte())
              : in.chance(3) ? in.one_of(kModes)
                             : RopeMode::plain;
  if (made.mode != RopeMode::plain && !in.spoil()) made.pairing = RopePairing::split_half;
  if (in.chance(4)) made.rotary_dim = static_cast<uint32_t>(in.number(dim / 2));
  made.partner = static_cast<RopeSpan>(in.number(in.chance(4) ? 1 : 0) & 0xFF);
  made.exponent = static_cast<RopeSpan>(in.number(in.chance(4) ? 1 : 0) & 0xFF);
  made.base = static_cast<double>(in.real(10000.0f));
  const auto quarter = static_cast<uint32_t>(dim / 8);
  if (made.mode != RopeMode::plain)
    for (uint32_t& section : made.sections) section = static_cast<uint32_t>(in.number(quarter));
  made.magnitude = in.real(1.0f);
  return made;
}

Tensor positions(FuzzWorld& w, RopeMode mode, uint64_t tokens) {
  const uint64_t axes = mode == RopeMode::plain ? 0 : mode == RopeMode::vision_2d ? 2 : 4;
  return w.indices(DType::i32, axes == 0 ? Dims{tokens} : Dims{axes, tokens}, 4000);
}

void fuzz_rope_op(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(6), heads = 1 + in.below(3), dim = w.head_dim();
  const RopeOptions options = some_options(w, dim);
  const Tensor x = w.floats({tokens, heads, dim});
  RopeInputs inputs{.x = x,
                    .positions = positions(w, options.mode, tokens),
                    .out = in.chance(3) ? x : w.floats({tokens, heads, dim})};
  if (in.chance(3)) {
    inputs.k = w.tensor(x.dtype(), {tokens, 1 + in.below(2), dim});
    inputs.k_out = in.chance(2) ? inputs.k : w.tensor(inputs.out.dtype(), inputs.k.shape());
  }
  if (in.chance(6)) inputs.frequencies = w.packed(DType::f32, {dim / 2});
  if (in.chance(6)) inputs.factors = w.packed(DType::f32, {dim / 2});
  const bool plain = !inputs.frequencies.defined() && !inputs.factors.defined();
  const bool compare = w.checked() && plain;
  const bool done = w.call("rope", [&] { rope(w.some_encoder(), inputs, options); });
  if (!done || !compare || in.spoiled() || !w.submit()) return;
  expect_bounded(inputs.out, 1.43f, "a rotated coordinate");
}

void fuzz_norm_rope(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(6), heads = 1 + in.below(3), dim = w.head_dim();
  NormRopeOptions options{
      .rope = some_options(w, dim), .epsilon = in.real(1e-6f), .weight_offset = in.real(0.0f)};
  if (in.chance(4)) options.rope.reset();
  const Tensor x = w.floats({tokens, heads, dim});
  NormRopeInputs inputs{.x = x, .out = in.chance(3) ? x : w.floats({tokens, heads, dim})};
  if (options.rope) inputs.positions = positions(w, options.rope->mode, tokens);
  if (in.chance(2)) inputs.weight = w.packed(w.float_type(), {dim});
  if (in.chance(4)) inputs.second = w.floats({tokens, heads, dim});
  if (in.chance(3)) {
    inputs.k = w.tensor(x.dtype(), {tokens, 1, dim});
    inputs.k_out = w.tensor(inputs.out.dtype(), {tokens, 1, dim});
    if (in.chance(2)) inputs.k_weight = w.packed(inputs.weight.dtype(), {dim});
    if (in.chance(4)) inputs.k_second = w.tensor(inputs.second.dtype(), {tokens, 1, dim});
  }
  const bool compare = w.checked();
  const bool done = w.call("norm_rope", [&] { norm_rope(w.some_encoder(), inputs, options); });
  if (!done || !compare || in.spoiled() || !w.submit()) return;
  expect_bounded(inputs.out, 1.43f * std::sqrt(static_cast<float>(dim)), "a normalised coordinate");
}

void fuzz_rope_append(FuzzWorld& w, FuzzInput& in) {
  const uint64_t tokens = in.below(10), kv_heads = 1 + in.below(2),
                 heads = kv_heads * (1 + in.below(3));
  const uint64_t dim = w.head_dim(), pages = 1 + in.below(3);
  RopeAppendOptions options{.rope = some_options(w, dim), .norm = {}};
  if (in.chance(4)) options.rope.reset();
  if (in.chance(3)) options.norm = RopeNorm{in.real(1e-6f), in.real(0.0f)};
  const DType dtype = w.float_type();
  RopeAppendInputs inputs{.k = w.tensor(dtype, {tokens, kv_heads, dim}),
                          .v = w.tensor(dtype, {tokens, kv_heads, dim})};
  if (!in.chance(4)) {
    inputs.q = w.tensor(dtype, {tokens, heads, dim});
    inputs.q_out = in.chance(2) ? inputs.q : w.tensor(dtype, {tokens, heads, dim});
  }
  if (options.rope) inputs.positions = positions(w, options.rope->mode, tokens);
  if (options.norm && in.chance(2)) inputs.q_weight = w.packed(w.float_type(), {dim});
  if (options.norm && in.chance(2)) inputs.k_weight = w.packed(inputs.q_weight.dtype(), {dim});
  const KvPageShape shape{
      .k = w.format(), .v = w.format(), .kv_heads = kv_heads, .head_dim = dim, .page_tokens = 8};
  KvSlots to{.pages = w.pages(shape, pages), .slots = w.indices(DType::i32, {tokens}, pages * 8)};
  to.k_calibration = w.calibration(kv_heads, dim);
  to.v_calibration = w.calibration(kv_heads, dim);
  w.call("rope_append", [&] { rope_append(w.some_encoder(), inputs, to, options); });
}

void fuzz_rope_frequencies(FuzzWorld& w, FuzzInput& in) {
  RopeConfig config{.rope_theta = static_cast<double>(in.real(10000.0f)),
                    .rotary_dim = static_cast<uint32_t>(in.number(2 * (1 + in.below(64)))),
                    .rope_type = static_cast<RopeType>(in.number(in.below(6)) & 0xFF),
                    .factor = static_cast<double>(in.real(4.0f)),
                    .original_max_position_embeddings = static_cast<double>(in.real(4096.0f)),
                    .seq_len = static_cast<double>(in.real(8192.0f)),
                    .low_freq_factor = static_cast<double>(in.real(1.0f)),
                    .high_freq_factor = static_cast<double>(in.real(4.0f)),
                    .beta_fast = static_cast<double>(in.real(32.0f)),
                    .beta_slow = static_cast<double>(in.real(1.0f))};
  if (in.chance(3)) config.attention_factor = static_cast<double>(in.real(1.0f));
  if (in.chance(3)) config.mscale = static_cast<double>(in.real(1.0f));
  if (in.chance(3)) config.mscale_all_dim = static_cast<double>(in.real(1.0f));
  config.truncate = !in.chance(3);
  RopeFrequencies made;
  if (!w.call("rope_frequencies", [&] { made = rope_frequencies(config); })) return;
  expect(made.inverse.size() == config.rotary_dim / 2, "another number of frequencies than pairs");
  for (const double value : made.inverse) expect(std::isfinite(value), "a frequency is not finite");
  expect(std::isfinite(made.attention_factor), "the attention factor is not finite");
  ++fuzz_stats().compared;
  for (double& value : made.inverse)
    if (in.spoil()) value = static_cast<double>(in.real(1.0f));
  w.call("rope_table", [&] {
    expect(rope_table(w.some_device(), made.inverse).shape(0) == made.inverse.size(),
           "a table of another size");
  });
}

}  // namespace

std::span<const FuzzCall> fuzz_rope_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_rope_op, fuzz_norm_rope, fuzz_rope_append,
                                        fuzz_rope_frequencies};
  return kCalls;
}

}  // namespace gyre::test
