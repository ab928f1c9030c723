#include <limits>

#include "refused_call.h"

namespace gyre::test {
namespace {

// A call that would be fine; each refusal changes one thing about it.
KvQuantizeInputs good_call(FilledTensors& tensors) {
  const auto cache = [&](KvFormat format, KvRole role, uint64_t dim) {
    const KvShape shape{format, role, 3, 9, dim};
    return KvBuffer{shape, tensors.make(DType::u8, kv_codes_shape(shape)),
                    tensors.make(DType::u8, kv_scales_shape(shape))};
  };
  const auto calibration = [&](uint64_t dim) {
    const auto matrix = [&] { return tensors.make(DType::f32, {3, dim, dim}); };
    const auto vector = [&] { return tensors.make(DType::f32, {3, dim}); };
    return KvCalibration{{matrix(), matrix(), vector()}, {matrix(), vector(), {0.9f, 1.0f}}};
  };
  return {.k = tensors.make(DType::f32, {5, 3, 64}),
          .k_cache = cache(KvFormat::tq4, KvRole::k, 64),
          .v = tensors.make(DType::f32, {5, 3, 32}),
          .v_cache = cache(KvFormat::tq3, KvRole::v, 32),
          .k_calibration = calibration(64),
          .v_calibration = calibration(32)};
}

// K and its cache; the calibration stays that of 64.
void set_head_dim(KvQuantizeInputs& call, FilledTensors& tensors, uint64_t dim) {
  const KvShape shape{KvFormat::tq4, KvRole::k, 3, 9, dim};
  call.k = tensors.make(DType::f32, {5, 3, dim});
  call.k_cache = {shape, tensors.make(DType::u8, kv_codes_shape(shape)),
                  tensors.make(DType::u8, kv_scales_shape(shape))};
}

constexpr RefusedCall<KvQuantizeInputs> refusal{
    "kv_quantize", good_call, [](Encoder& e, const KvQuantizeInputs& c) { kv_quantize(e, c); }};

KvTransformInputs good_product(FilledTensors& tensors) {
  return {.x = tensors.make(DType::f32, {5, 6, 64}),
          .matrix = tensors.make(DType::f32, {3, 64, 64}),
          .before = tensors.make(DType::f32, {3, 64}),
          .after = {},
          .out = tensors.make(DType::f16, {5, 6, 64})};
}

constexpr RefusedCall<KvTransformInputs> product_refusal{
    "kv_transform", good_product,
    [](Encoder& e, const KvTransformInputs& c) { kv_transform(e, c); }};

}  // namespace

std::vector<Refusal> kv_calibrated_refusals() {
  return {
      refusal("no inverse", {"transform of k", "inverse is undefined"},
              CHANGE(c.k_calibration.transform.inverse = {})),
      refusal("a mean alone", {"transform of v", "matrix is undefined"},
              CHANGE(c.v_calibration.transform.matrix = c.v_calibration.transform.inverse = {})),
      refusal("matrix of another head_dim",
              {"transform matrix of k", "f32 [3, 64, 64]", "got f32 [3, 32, 32]"},
              CHANGE(c.k_calibration.transform.matrix = c.v_calibration.transform.matrix)),
      refusal("inverse that is not f32", {"transform inverse of k", "got f16"},
              CHANGE(c.k_calibration.transform.inverse = t.make(DType::f16, {3, 64, 64}))),
      refusal("matrix with other strides", {"transform matrix of k", "contiguous"},
              CHANGE(c.k_calibration.transform.matrix =
                         c.k_calibration.transform.matrix.permute({0, 2, 1}))),
      refusal("mean of another shape", {"the mean of v", "f32 [3, 32]"},
              CHANGE(c.v_calibration.transform.mean = c.k_calibration.transform.mean)),
      refusal("no diagonal", {"feedback of k", "only factor is defined"},
              CHANGE(c.k_calibration.feedback.diagonal = {})),
      refusal("no factor", {"feedback of v", "only diagonal is defined"},
              CHANGE(c.v_calibration.feedback.factor = {})),
      refusal(
          "factor of other heads", {"feedback factor of k", "got f32 [2, 64, 64]"},
          CHANGE(c.k_calibration.feedback.factor = c.k_calibration.feedback.factor.slice(0, 0, 2))),
      refusal("nine gains", {"at most 8 gains", "k has 9"},
              CHANGE(c.k_calibration.feedback.gains.assign(9, 1.0f))),
      refusal("a gain of zero", {"gains of v", "from 0.25 to 4", "got 0"},
              CHANGE(c.v_calibration.feedback.gains[1] = 0)),
      refusal("a gain that is no number", {"gains of v", "got nan"},
              CHANGE(c.v_calibration.feedback.gains[1] = std::numeric_limits<float>::quiet_NaN())),
      refusal("a calibration without rows", {"k_calibration is defined", "k is not"},
              CHANGE(c.k = {}, c.k_cache = {})),
      refusal("a head_dim of several transforms", {"power of two from 16 to 512", "k has 80"},
              CHANGE(set_head_dim(c, t, 80))),
      refusal("a head_dim of four scales", {"power of two from 16 to 512", "k has 1024"},
              CHANGE(set_head_dim(c, t, 1024))),
      refusal("matrices of another head_dim than 512",
              {"transform matrix of k", "f32 [3, 512, 512]", "got f32 [3, 64, 64]"},
              CHANGE(set_head_dim(c, t, 512))),
      refusal("an mlx-native format", {"native formats", "k is mlx_native4"},
              [](auto& c, FilledTensors& t) {
                const KvShape shape{KvFormat::mlx_native4, KvRole::k, 3, 9, 128};
                c.k = t.make(DType::f32, {5, 3, 128});
                c.k_cache = {shape, t.make(DType::u8, kv_codes_shape(shape)),
                             t.make(DType::f32, kv_scales_shape(shape))};
              }),
  };
}

std::vector<Refusal> kv_transform_refusals() {
  return {
      product_refusal("no x", {"x must be [tokens, heads, head_dim]"}, CHANGE(c.x = {})),
      product_refusal("x of integers", {"x must be f32, f16 or bf16", "got i32"},
                      CHANGE(c.x = t.make(DType::i32, {5, 6, 64}))),
      product_refusal("out of another shape", {"out must have the shape of x", "got [5, 6, 32]"},
                      CHANGE(c.out = t.make(DType::f32, {5, 6, 32}))),
      product_refusal("heads of no group", {"kv_heads a divisor of 6"},
                      CHANGE(c.matrix = t.make(DType::f32, {4, 64, 64}))),
      product_refusal("more matrices than a grid has", {"at most 2^14 matrices", "got 16385"},
                      CHANGE(c.x = c.out = t.make(DType::f32, {1, 16385, 16}),
                             c.matrix = t.make(DType::f32, {16385, 16, 16}), c.before = {})),
      product_refusal("head_dim of 24", {"a multiple of 16", "got 24"},
                      CHANGE(c.x = c.out = t.make(DType::f32, {5, 6, 24}))),
      product_refusal("matrix of another head_dim", {"matrix of x", "f32 [3, 64, 64]"},
                      CHANGE(c.matrix = t.make(DType::f32, {3, 64, 32}))),
      product_refusal("after of another shape", {"after of x", "f32 [3, 64]"},
                      CHANGE(c.after = t.make(DType::f32, {3, 32}))),
      product_refusal("out over part of x", {"x and out share memory"},
                      [](auto& c, FilledTensors& t) {
                        const Tensor rows = t.make(DType::f32, {6, 6, 64});
                        c.x = rows.slice(0, 0, 5), c.out = rows.slice(0, 1, 5);
                      }),
      product_refusal("out over the matrix", {"out shares memory with matrix"},
                      CHANGE(c.x = c.x.slice(0, 0, 1).slice(1, 0, 3),
                             c.out = c.matrix.slice(1, 0, 1).permute({1, 0, 2}))),
  };
}

}  // namespace gyre::test
