#include "rope_append.h"

#include "kv_calibration.h"
#include "kv_pages.h"

namespace gyre::python {

void bind_rope_append(nb::module_& module) {
  const auto record = [](Encoder& encoder, const Operand& k, const Operand& v,
                         const BoundKvPages& pages, const Operand& slots,
                         const std::optional<KvCalibration>& k_calibration,
                         const std::optional<KvCalibration>& v_calibration, const Operands& operand,
                         RopeAppendInputs& inputs, const RopeAppendOptions& options) {
    inputs.k = operand("k", k), inputs.v = operand("v", v);
    const KvSlots to{pages.pages, operand("slots", slots), calibration_or_none(k_calibration),
                     calibration_or_none(v_calibration)};
    without_gil([&] { rope_append(encoder, inputs, to, options); });
  };
  with_rope_append_arguments([&](const auto&... arguments) {
    module.def(
        "rope_append",
        rope_append_call(
            "rope_append",
            Types<Encoder&, const Operand&, const Operand&, const BoundKvPages&, const Operand&>{},
            Types<const std::optional<KvCalibration>&, const std::optional<KvCalibration>&>{},
            record),
        "encoder"_a, "k"_a, "v"_a, "pages"_a, "slots"_a, arguments...,
        "k_calibration"_a = nb::none(), "v_calibration"_a = nb::none(),
        "Records rope() of q and k and kv_write() of k and v as one command, with the same bits, "
        "and returns q_out.\n\n"
        "q is [tokens, heads, head_dim], or None to store k and v alone. q_out has q's shape and "
        "may be q; if you leave it out, a gyre.Tensor like q is made. k and v are [tokens, "
        "kv_heads, head_dim]. All have one dtype: f32, f16 or bf16. pages, slots and the "
        "calibrations are those of kv_write(). With rope=False only the norm runs, and "
        "positions is None. With norm=True each head gets an RMS norm first, with q_weight and "
        "k_weight. The other arguments are those of rope() and norm_rope().");
  });
}

}  // namespace gyre::python
