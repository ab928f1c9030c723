#include "kv_coding.h"

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
      "kv_basis",
      [](Encoder& encoder, const Operand& x, const Operand& matrix, const Operand& out,
         const OptionalOperand& before, const OptionalOperand& after) {
        const Operands operand(encoder, "kv_basis");
        const KvBasisInputs inputs{.x = operand("x", x),
                                   .matrix = operand("matrix", matrix),
                                   .before = operand("before", before),
                                   .after = operand("after", after),
                                   .out = operand("out", out)};
        without_gil([&] { kv_basis(encoder, inputs); });
      },
      "encoder"_a, "x"_a, "matrix"_a, "out"_a, nb::kw_only(), "before"_a = nb::none(),
      "after"_a = nb::none(),
      "out = matrix (x - before) + after, head by head. x, out: [tokens, heads, head_dim], f32, "
      "f16 or bf16. matrix: f32 [kv_heads, head_dim, head_dim], row i is what coordinate i adds; "
      "before, after: f32 [kv_heads, head_dim].");
}

}  // namespace

void bind_kv_coding(nb::module_& module) {
  nb::class_<KvBasis>(module, "KvBasis", "The basis that rows of K or V are stored in.")
      .def(
          "__init__",
          [](KvBasis* self, const Operand& matrix, const Operand& inverse,
             const OptionalOperand& mean, const DeviceLike& device) {
            const Device home = device_of(device);
            new (self) KvBasis{copied("KvBasis: matrix", matrix, home),
                               copied("KvBasis: inverse", inverse, home),
                               copied("KvBasis: mean", mean, home)};
          },
          "matrix"_a, "inverse"_a, "mean"_a = nb::none(), nb::kw_only(), "device"_a = "cpu",
          "matrix, inverse: f32 [kv_heads, head_dim, head_dim], symmetric. mean: f32 [kv_heads, "
          "head_dim]. Copied to the device.");
  nb::class_<KvShaping>(module, "KvShaping", "How codes are chosen: error feedback, and gains.")
      .def(
          "__init__",
          [](KvShaping* self, const OptionalOperand& factor, const OptionalOperand& diagonal,
             const std::vector<float>& gains, const DeviceLike& device) {
            const Device home = device_of(device);
            new (self) KvShaping{copied("KvShaping: factor", factor, home),
                                 copied("KvShaping: diagonal", diagonal, home), gains};
          },
          "factor"_a = nb::none(), "diagonal"_a = nb::none(), "gains"_a = std::vector<float>{},
          nb::kw_only(), "device"_a = "cpu",
          "factor: f32 [kv_heads, head_dim, head_dim], row i is what the error of coordinate i "
          "adds "
          "to later ones. diagonal: f32 [kv_heads, head_dim]. gains: up to 8 that are tried.")
      .def_ro("gains", &KvShaping::gains);
  nb::class_<KvCoding>(module, "KvCoding", "What a calibration says about K or V of one layer.")
      .def(
          "__init__",
          [](KvCoding* self, const std::optional<KvBasis>& basis,
             const std::optional<KvShaping>& shaping) {
            new (self) KvCoding{basis.value_or(KvBasis{}), shaping.value_or(KvShaping{})};
          },
          "basis"_a = nb::none(), "shaping"_a = nb::none());
  bind_op(module);
}

}  // namespace gyre::python
