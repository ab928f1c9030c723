#include "cache/calibration_identity.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "cache/layers.h"
#include "files/container.h"
#include "ops/kv_calibration.h"
#include "ops/kv_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

using Values = std::vector<float>;

// Tensors that are not there count, too: what follows them would otherwise look like them.
Values add_tensor(Checksum& checksum, const Tensor& tensor) {
  const uint64_t elements = tensor.defined() ? tensor.elements() : 0;
  checksum.add(std::as_bytes(std::span(&elements, 1)));
  Values values(elements);
  if (elements != 0) tensor.read_to(std::span<float>(values));
  checksum.add(std::as_bytes(std::span(values)));
  return values;
}

// matrix times x; transposed: what kv_transform computes.
std::vector<double> product(std::span<const float> matrix, std::span<const double> x,
                            bool transposed) {
  const size_t n = x.size();
  std::vector<double> out(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j)
      out[transposed ? j : i] += matrix[i * n + j] * x[transposed ? i : j];
  }
  return out;
}

// What reads the rows of a stream. Scores pass through the inverse before the matrix, outputs
// behind it. A latent is read by both, its rotary part by scores alone.
struct Readers {
  bool scores, outputs;
};
constexpr Readers readers_of(bool is_v, bool latent) {
  return {.scores = !is_v || latent, .outputs = is_v != latent};
}

// Whether some rows come back: a product of the matrices would take seconds. No two coordinates are
// close in all of them.
bool is_inverse(std::span<const float> matrix, std::span<const float> inverse, size_t n,
                Readers readers) {
  constexpr int kRows = 4;
  std::minstd_rand random(n);
  std::vector<double> row(n);
  for (int r = 0; r < kRows; ++r) {
    std::uniform_real_distribution<double> of(-1, 1);
    for (double& x : row) x = of(random);
    const auto is_row = [&](const std::vector<double>& back) {
      double size = 0, error = 0;
      for (size_t i = 0; i < n; ++i) {
        size += row[i] * row[i];
        error += (back[i] - row[i]) * (back[i] - row[i]);
      }
      return error <= 1e-6 * size;  // not where there is a NaN
    };
    if (readers.scores && !is_row(product(matrix, product(inverse, row, true), false)))
      return false;
    if (readers.outputs && !is_row(product(inverse, product(matrix, row, true), true)))
      return false;
  }
  return true;
}

void add_calibration(Checksum& checksum, const CalibratedLayer& layer,
                     const KvCalibration& calibration, bool is_v) {
  const Values matrix = add_tensor(checksum, calibration.transform.matrix);
  const Values inverse = add_tensor(checksum, calibration.transform.inverse);
  const size_t n = matrix.empty() ? 1 : calibration.transform.matrix.shape(1);
  for (size_t first = 0; first < matrix.size(); first += n * n) {
    require(is_inverse(std::span(matrix).subspan(first, n * n),
                       std::span(inverse).subspan(first, n * n), n, readers_of(is_v, layer.latent)),
            layer.op, ": layer ", layer.index, ": inverse times matrix of ", is_v ? "v" : "k",
            ", head ", first / (n * n), ", is not 1");
  }
  for (const Tensor* tensor : {&calibration.transform.mean, &calibration.feedback.factor,
                               &calibration.feedback.diagonal}) {
    const Values values = add_tensor(checksum, *tensor);
    require(std::ranges::all_of(values, [](float x) { return std::isfinite(x); }), layer.op,
            ": layer ", layer.index, ": mean, factor and diagonal of ", is_v ? "v" : "k",
            " must be finite");
  }
  checksum.add(std::as_bytes(std::span(calibration.feedback.gains)));
}

}  // namespace

void check_layer_calibrations(const char* op, const std::vector<KvLayer>& layers,
                              const std::vector<KvLayerCalibration>& calibrations) {
  require(calibrations.empty() || calibrations.size() == layers.size(), op,
          ": calibrations are for every layer or for none, got ", calibrations.size(), " for ",
          layers.size(), " layers");
  for (size_t i = 0; i < calibrations.size(); ++i) {
    const KvLayerCalibration& calibration = calibrations[i];
    if (!calibration.k.defined() && !calibration.v.defined()) continue;
    const KvLayer& layer = layers[i];
    require(!shares_kv(layer), op, ": layer ", i, " shares the cache of layer ",
            owner_of(layers, i), ", whose calibration it reads, and has one of its own");
    require(is_native(layer.k) && is_native(layer.v), op, ": layer ", i, " is ",
            gyre::name(layer.k), " and ", gyre::name(layer.v),
            ", a calibration is for native formats of both");
    require(calibration.k.transform.defined() == calibration.v.transform.defined(), op, ": layer ",
            i, " has a transform of ", calibration.k.transform.defined() ? "k" : "v", " alone");
    check_calibration(op, "k", calibration.k, layer.k, layer.kv_heads, layer.head_dim);
    check_calibration(op, "v", calibration.v, layer.v, layer.kv_heads, layer.v_head_dim);
  }
}

uint64_t calibration_checksum(const CalibratedLayer& layer, const KvLayerCalibration& calibration) {
  if (!calibration.k.defined() && !calibration.v.defined()) return 0;
  Checksum checksum;
  add_calibration(checksum, layer, calibration.k, false);
  add_calibration(checksum, layer, calibration.v, true);
  return std::max<uint64_t>(1, checksum.value());
}

uint32_t calibration_identity(std::span<const uint64_t> checksums) {
  if (std::ranges::all_of(checksums, [](uint64_t checksum) { return checksum == 0; })) return 0;
  return std::max(1u, static_cast<uint32_t>(checksum_of(std::as_bytes(checksums))));
}

}  // namespace gyre
