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
        "Records rope() of q and k and kv_write() of k and v as one command, with the same "
        "bits.\n\n"
        "q is [tokens, heads, head_dim], or None to store k and v alone. q_out has q's shape and "
        "may be q. k and v are [tokens, kv_heads, head_dim]. All have one dtype: f32, f16 or bf16. "
        "pages and slots are those of kv_write(). With rope=False only the norm runs, and "
        "positions is None. With norm=True each head gets an RMS norm first, with q_weight and "
        "k_weight. The other arguments are those of rope() and norm_rope().");
  });
}

}  // namespace gyre::python
