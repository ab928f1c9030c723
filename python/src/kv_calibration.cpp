#include "kv_calibration.h"

#include "exchange.h"

namespace gyre::python {
namespace {

// A copy in memory of the device: whoever calibrated may go on with theirs.
Tensor copied(const char* what, const OptionalOperand& operand, const Device& device) {
  if (!operand.has_value()) return {};
  const Tensor source = as_tensor(operand->object, std::nullopt, what).tensor;
  if (source.dtype() != DType::f32) refuse(what, " must be f32, got ", name(source.dtype()));
  std::vector<float> values(source.elements());
  source.read_to(std::span<float>(values));
  Tensor made = device.tensor(DType::f32, source.shape());
  made.write_from(std::span<const float>(values));
  return made;
}

void bind_op(nb::module_& module) {
  module.def(
      "kv_transform",
      [](Encoder& encoder, const Operand& x, const Operand& matrix, const OptionalOperand& out,
         const OptionalOperand& before, const OptionalOperand& after) {
        const Operands operand(encoder, "kv_transform");
        const Tensor from = operand("x", x);
        const Written to = operand.written("out", out, from.dtype(), from.shape());
        const KvTransformInputs inputs{.x = from,
                                       .matrix = operand("matrix", matrix),
                                       .before = operand("before", before),
                                       .after = operand("after", after),
                                       .out = to.tensor};
        without_gil([&] { kv_transform(encoder, inputs); });
        return to.result;
      },
      "encoder"_a, "x"_a, "matrix"_a, "out"_a = nb::none(), nb::kw_only(), "before"_a = nb::none(),
      "after"_a = nb::none(),
      "Records out = matrix (x - before) + after for each head and returns out.\n\n"
      "x and out are [tokens, heads, head_dim], f32, f16 or bf16; if you leave out `out`, a "
      "gyre.Tensor like x is made. matrix is f32 [kv_heads, head_dim, head_dim]; row i is what "
      "coordinate i adds. before and after are f32 [kv_heads, head_dim].");
}

}  // namespace

void bind_kv_calibration(nb::module_& module) {
  nb::class_<KvTransform>(module, "KvTransform", "The transform that rows of K or V are stored in.")
      .def(
          "__init__",
          [](KvTransform* self, const Operand& matrix, const Operand& inverse,
             const OptionalOperand& mean, const DeviceLike& device) {
            const Device home = device_of(device);
            new (self) KvTransform{copied("KvTransform: matrix", matrix, home),
                                   copied("KvTransform: inverse", inverse, home),
                                   copied("KvTransform: mean", mean, home)};
          },
          "matrix"_a, "inverse"_a, "mean"_a = nb::none(), nb::kw_only(), "device"_a = "cpu",
          "matrix and inverse are symmetric, f32 [kv_heads, head_dim, head_dim]. mean is f32 "
          "[kv_heads, head_dim]. All are copied to the device.");
  nb::class_<KvFeedback>(module, "KvFeedback",
                         "How the encoder picks codes: error feedback, and the gains it tries.")
      .def(
          "__init__",
          [](KvFeedback* self, const OptionalOperand& factor, const OptionalOperand& diagonal,
             const std::vector<float>& gains, const DeviceLike& device) {
            const Device home = device_of(device);
            new (self) KvFeedback{copied("KvFeedback: factor", factor, home),
                                  copied("KvFeedback: diagonal", diagonal, home), gains};
          },
          "factor"_a = nb::none(), "diagonal"_a = nb::none(), "gains"_a = std::vector<float>{},
          nb::kw_only(), "device"_a = "cpu",
          "factor is f32 [kv_heads, head_dim, head_dim]; row i is what the error of coordinate i "
          "adds to later coordinates. diagonal is f32 [kv_heads, head_dim]. gains are up to 8 "
          "factors that the encoder tries for each row's scale.")
      .def_ro("gains", &KvFeedback::gains, "The factors that the encoder tries.");
  nb::class_<KvCalibration>(module, "KvCalibration", "The calibration of K or V of one layer.")
      .def(
          "__init__",
          [](KvCalibration* self, const std::optional<KvTransform>& transform,
             const std::optional<KvFeedback>& feedback) {
            new (self)
                KvCalibration{transform.value_or(KvTransform{}), feedback.value_or(KvFeedback{})};
          },
          "transform"_a = nb::none(), "feedback"_a = nb::none(),
          "Leave out the transform or the feedback to have the other alone.");
  bind_op(module);
}

}  // namespace gyre::python
