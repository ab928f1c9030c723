#include <algorithm>

#include "rope_options.h"

namespace gyre::python {
namespace {

constexpr Choice<RopePairing> kPairings[] = {{"split_half", RopePairing::split_half},
                                             {"adjacent", RopePairing::adjacent}};
constexpr Choice<RopeMode> kModes[] = {{"plain", RopeMode::plain},
                                       {"sectioned", RopeMode::sectioned},
                                       {"vision", RopeMode::vision},
                                       {"interleaved", RopeMode::interleaved},
                                       {"vision_2d", RopeMode::vision_2d}};
constexpr Choice<RopeSpan> kSpans[] = {{"rotary_dim", RopeSpan::rotary_dim},
                                       {"head_dim", RopeSpan::head_dim}};
constexpr Choice<RopeType> kTypes[] = {
    {"standard", RopeType::standard}, {"linear", RopeType::linear}, {"ntk", RopeType::ntk},
    {"dynamic", RopeType::dynamic},   {"yarn", RopeType::yarn},     {"llama3", RopeType::llama3}};

Operand record_rope(Encoder& encoder, const Operand& x, const Operand& positions,
                    const OptionalOperand& out, const OptionalOperand& k,
                    const OptionalOperand& k_out, const OptionalOperand& frequencies,
                    const OptionalOperand& factors, const std::string& pairing,
                    const std::string& mode, std::optional<uint32_t> rotary_dim,
                    const std::string& partner, const std::string& exponent, double base,
                    const Sections& sections, float magnitude) {
  const Operands operand(encoder, "rope");
  const Tensor from = operand("x", x);
  const Tensor k_from = operand("k", k);
  const Written to = operand.written("out", out, from.dtype(), from.shape());
  const std::optional<Written> k_to = operand.written_like("k_out", k_out, k_from);
  const RopeInputs inputs{.x = from,
                          .positions = operand("positions", positions),
                          .out = to.tensor,
                          .k = k_from,
                          .k_out = tensor_of(k_to),
                          .frequencies = operand("frequencies", frequencies),
                          .factors = operand("factors", factors)};
  const RopeOptions options =
      options_of({pairing, mode, rotary_dim, partner, exponent, base, sections, magnitude});
  without_gil([&] { rope(encoder, inputs, options); });
  return results(to, k_to);
}

Operand record_norm_rope(Encoder& encoder, const Operand& x, const OptionalOperand& positions,
                         const OptionalOperand& out, const OptionalOperand& weight,
                         const OptionalOperand& second, const OptionalOperand& k,
                         const OptionalOperand& k_out, const OptionalOperand& k_weight,
                         const OptionalOperand& k_second, const OptionalOperand& frequencies,
                         const OptionalOperand& factors, bool rotate, double epsilon,
                         float weight_offset, const std::string& pairing, const std::string& mode,
                         std::optional<uint32_t> rotary_dim, const std::string& partner,
                         const std::string& exponent, double base, const Sections& sections,
                         float magnitude) {
  const Operands operand(encoder, "norm_rope");
  const Tensor from = operand("x", x);
  const Tensor k_from = operand("k", k);
  const Written to = operand.written("out", out, from.dtype(), from.shape());
  const std::optional<Written> k_to = operand.written_like("k_out", k_out, k_from);
  const NormRopeInputs inputs{.x = from,
                              .positions = operand("positions", positions),
                              .out = to.tensor,
                              .weight = operand("weight", weight),
                              .second = operand("second", second),
                              .k = k_from,
                              .k_out = tensor_of(k_to),
                              .k_weight = operand("k_weight", k_weight),
                              .k_second = operand("k_second", k_second),
                              .frequencies = operand("frequencies", frequencies),
                              .factors = operand("factors", factors)};
  NormRopeOptions options{
      .rope = std::nullopt, .epsilon = static_cast<float>(epsilon), .weight_offset = weight_offset};
  if (rotate)
    options.rope =
        options_of({pairing, mode, rotary_dim, partner, exponent, base, sections, magnitude});
  without_gil([&] { norm_rope(encoder, inputs, options); });
  return results(to, k_to);
}

RopeFrequencies frequencies_of(double rope_theta, uint32_t rotary_dim, const std::string& rope_type,
                               double factor, double original_max_position_embeddings,
                               double seq_len, double low_freq_factor, double high_freq_factor,
                               double beta_fast, double beta_slow,
                               std::optional<double> attention_factor, std::optional<double> mscale,
                               std::optional<double> mscale_all_dim, bool truncate) {
  return rope_frequencies({.rope_theta = rope_theta,
                           .rotary_dim = rotary_dim,
                           .rope_type = choose("rope_frequencies: rope_type", rope_type, kTypes),
                           .factor = factor,
                           .original_max_position_embeddings = original_max_position_embeddings,
                           .seq_len = seq_len,
                           .low_freq_factor = low_freq_factor,
                           .high_freq_factor = high_freq_factor,
                           .beta_fast = beta_fast,
                           .beta_slow = beta_slow,
                           .attention_factor = attention_factor,
                           .mscale = mscale,
                           .mscale_all_dim = mscale_all_dim,
                           .truncate = truncate});
}

void bind_frequencies(nb::module_& module) {
  nb::class_<RopeFrequencies>(module, "RopeFrequencies", "What rope_frequencies() computes.")
      .def_ro("inverse", &RopeFrequencies::inverse, "Radians per position, one for each pair.")
      .def_ro("attention_factor", &RopeFrequencies::attention_factor,
              "The factor for rope(magnitude=).");
  module.def("rope_frequencies", frequencies_of, "rope_theta"_a = 10000.0, nb::kw_only(),
             "rotary_dim"_a, "rope_type"_a = "standard", "factor"_a = 1.0,
             "original_max_position_embeddings"_a = 0.0, "seq_len"_a = 0.0,
             "low_freq_factor"_a = 1.0, "high_freq_factor"_a = 4.0, "beta_fast"_a = 32.0,
             "beta_slow"_a = 1.0, "attention_factor"_a = nb::none(), "mscale"_a = nb::none(),
             "mscale_all_dim"_a = nb::none(), "truncate"_a = true,
             "Computes scaled frequencies from the names of a model's config (\"rope_scaling\"). "
             "rope_type is standard, linear, ntk, dynamic, yarn or llama3. rotary_dim is the "
             "number of coordinates that rotate.");
  module.def(
      "rope_table",
      [](const DeviceLike& device, const std::vector<double>& radians_per_position) {
        Device home = device_of(device);
        Tensor table = without_gil([&] { return rope_table(home, radians_per_position); });
        return BoundTensor{std::move(home), std::move(table)};
      },
      "device"_a, "radians_per_position"_a,
      "Returns frequencies as the kernels use them, exact at any position: u32 [pairs, 2].");
}

}  // namespace

RopeOptions options_of(const RopeArguments& given) {
  RopeOptions options{.pairing = choose("rope: pairing", given.pairing, kPairings),
                      .mode = choose("rope: mode", given.mode, kModes),
                      .rotary_dim = given.rotary_dim,
                      .partner = choose("rope: partner", given.partner, kSpans),
                      .exponent = choose("rope: exponent", given.exponent, kSpans),
                      .base = given.base,
                      .magnitude = given.magnitude};
  std::copy(given.sections.begin(), given.sections.end(), std::begin(options.sections));
  return options;
}

void bind_rope(nb::module_& module) {
  module.def(
      "rope", record_rope, "encoder"_a, "x"_a, "positions"_a, "out"_a = nb::none(),
      "k"_a = nb::none(), "k_out"_a = nb::none(), "frequencies"_a = nb::none(),
      "factors"_a = nb::none(), nb::kw_only(), "pairing"_a = "split_half", "mode"_a = "plain",
      "rotary_dim"_a = nb::none(), "partner"_a = "rotary_dim", "exponent"_a = "rotary_dim",
      "base"_a = 10000.0, "sections"_a = Sections{}, "magnitude"_a = 1.0f,
      "Records a rotary embedding of x and returns out: pairs rotate by position times "
      "frequency.\n\n"
      "x is [tokens, heads, head_dim], f32, f16 or bf16, with head_dim contiguous. positions is "
      "i32 or u32 [tokens]; it is [4, tokens] for the modes sectioned, interleaved and vision, and "
      "[2, tokens] for vision_2d. out has x's shape and any float dtype, and may be x; if you "
      "leave it out, a gyre.Tensor like x is made. k is a second tensor that rotates by the same "
      "angles, into k_out or into a new gyre.Tensor; its heads may differ. With k the call returns "
      "(out, k_out).\n\n"
      "frequencies is f32 [pairs] in radians, or the result of rope_table(); without it they "
      "follow from base. factors, f32 [pairs], divides the frequencies. pairing is \"split_half\" "
      "(NeoX, Hugging Face) or \"adjacent\" (GPT-J). rotary_dim is the number of coordinates that "
      "rotate, by default all. partner and exponent are \"rotary_dim\" or \"head_dim\". sections "
      "holds the pairs of each axis. magnitude scales the rotated coordinates (YaRN).");
  module.def(
      "norm_rope", record_norm_rope, "encoder"_a, "x"_a, "positions"_a.none(), "out"_a = nb::none(),
      "weight"_a = nb::none(), "second"_a = nb::none(), "k"_a = nb::none(), "k_out"_a = nb::none(),
      "k_weight"_a = nb::none(), "k_second"_a = nb::none(), "frequencies"_a = nb::none(),
      "factors"_a = nb::none(), nb::kw_only(), "rope"_a = true, "epsilon"_a = 1e-6,
      "weight_offset"_a = 0.0f, "pairing"_a = "split_half", "mode"_a = "plain",
      "rotary_dim"_a = nb::none(), "partner"_a = "rotary_dim", "exponent"_a = "rotary_dim",
      "base"_a = 10000.0, "sections"_a = Sections{}, "magnitude"_a = 1.0f,
      "Records an RMS norm of each head and then rope(), in one pass, and returns out.\n\n"
      "x is [tokens, heads, head_dim]; if you leave out `out`, a gyre.Tensor like x is made. k and "
      "k_out are those of rope(), and with k the call returns (out, k_out). "
      "weight and k_weight are [head_dim], f32, f16 or bf16, by default 1. second and k_second are "
      "one more output each, of another dtype or layout. With rope=False only the norm runs, and "
      "positions is None. weight_offset is 1 for models that store weight - 1 (Gemma). The other "
      "arguments are those of rope().");
  module.def(
      "supports_rope",
      [](const DeviceLike& device, const std::string& x, const std::string& out) {
        return supports(device_of(device), RopeTypes{dtype_named(x), dtype_named(out)});
      },
      "device"_a, nb::kw_only(), "x"_a = "f32", "out"_a = "f32",
      "Returns whether a device has a kernel for rope() with these dtypes.");
  bind_frequencies(module);
}

}  // namespace gyre::python
