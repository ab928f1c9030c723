#include "rope_append.h"

#include "kv_pages.h"

namespace gyre::python {

void bind_rope_append(nb::module_& module) {
  const auto record = [](Encoder& encoder, const Operand& k, const Operand& v,
                         const BoundKvPages& pages, const Operand& slots, const Operands& operand,
                         RopeAppendInputs& inputs, const RopeAppendOptions& options) {
    inputs.k = operand("k", k), inputs.v = operand("v", v);
    const KvSlots to{pages.pages, operand("slots", slots)};
    without_gil([&] { rope_append(encoder, inputs, to, options); });
  };
  with_rope_append_arguments([&](const auto&... arguments) {
    module.def(
        "rope_append",
        rope_append_call<Encoder&, const Operand&, const Operand&, const BoundKvPages&,
                         const Operand&>("rope_append", record),
        "encoder"_a, "k"_a, "v"_a, "pages"_a, "slots"_a, arguments...,
        "Everything beside attention in one command: rotates q into q_out, rotates k and stores it "
        "and v. The bits are those of rope() (norm: norm_rope()) and kv_write() after it.\n\n"
        "q: [tokens, heads, head_dim]; None: k and v alone. q_out: like q, may be q. k, v: "
        "[tokens, kv_heads, head_dim]. One dtype for all of them: f32, f16 or bf16. pages, slots: "
        "as in kv_write(). rope: False is the norm alone, positions is then None. norm: RMS norm "
        "of each head first, with q_weight and k_weight. The rest as in rope() and norm_rope().");
  });
}

}  // namespace gyre::python
