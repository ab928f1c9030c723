#pragma once
// What gyre.rope_append, KvCache.rope_append and KvBatch.rope_append have in common: every argument
// after those that say where k and v go.

#include <tuple>

#include "rope_options.h"

namespace gyre::python {

template <class... T>
struct Types {};

// The function to bind: record(front..., back..., operand, inputs, options), with k and v among
// `front`, which come first, and `back` last. It returns q_out.
template <class... Front, class... Back, class Record>
auto rope_append_call(const char* op, Types<Front...> /*first*/, Types<Back...> /*last*/,
                      const Record& record) {
  return [op, record](Front... front, const OptionalOperand& q, const OptionalOperand& q_out,
                      const OptionalOperand& positions, const OptionalOperand& q_weight,
                      const OptionalOperand& k_weight, const OptionalOperand& frequencies,
                      const OptionalOperand& factors, bool rope, bool norm, double epsilon,
                      float weight_offset, const std::string& pairing, const std::string& mode,
                      std::optional<uint32_t> rotary_dim, const std::string& partner,
                      const std::string& exponent, double base, const Sections& sections,
                      float magnitude, Back... back) {
    const Operands operand(std::get<Encoder&>(std::tie(front...)), op);
    const Tensor q_from = operand("q", q);
    const std::optional<Written> q_to = operand.written_like("q_out", q_out, q_from);
    RopeAppendInputs inputs{.q = q_from,
                            .q_out = tensor_of(q_to),
                            .positions = operand("positions", positions),
                            .q_weight = operand("q_weight", q_weight),
                            .k_weight = operand("k_weight", k_weight),
                            .frequencies = operand("frequencies", frequencies),
                            .factors = operand("factors", factors)};
    RopeAppendOptions options{.rope = std::nullopt, .norm = std::nullopt};
    if (rope)
      options.rope =
          options_of({pairing, mode, rotary_dim, partner, exponent, base, sections, magnitude});
    if (norm) options.norm = RopeNorm{static_cast<float>(epsilon), weight_offset};
    record(front..., back..., operand, inputs, options);
    return q_to ? OptionalOperand(q_to->result) : std::nullopt;
  };
}

// Calls def(arguments...) with the names and defaults of what rope_append_call adds.
template <class Def>
void with_rope_append_arguments(const Def& def) {
  def("q"_a = nb::none(), "q_out"_a = nb::none(), "positions"_a = nb::none(),
      "q_weight"_a = nb::none(), "k_weight"_a = nb::none(), "frequencies"_a = nb::none(),
      "factors"_a = nb::none(), nb::kw_only(), "rope"_a = true, "norm"_a = false,
      "epsilon"_a = 1e-6, "weight_offset"_a = 0.0f, "pairing"_a = "split_half", "mode"_a = "plain",
      "rotary_dim"_a = nb::none(), "partner"_a = "rotary_dim", "exponent"_a = "rotary_dim",
      "base"_a = 10000.0, "sections"_a = Sections{}, "magnitude"_a = 1.0f);
}

}  // namespace gyre::python
