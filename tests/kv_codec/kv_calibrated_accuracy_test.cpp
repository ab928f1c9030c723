// What a calibration of rows with two scales is worth: squared errors in the metric of their
// readers' second moments, plain against calibrated, on correlated rows.
#include <iostream>
#include <numbers>

#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_codec_reference.h"

namespace gyre::test {
namespace {

constexpr size_t kDim = 512, kRows = 128;

using Matrix = std::vector<double>;  // [kDim, kDim]

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix out(kDim * kDim);
  for (size_t i = 0; i < kDim; ++i)
    for (size_t k = 0; k < kDim; ++k)
      for (size_t j = 0; j < kDim; ++j) out[i * kDim + j] += a[i * kDim + k] * b[k * kDim + j];
  return out;
}

// Eigenvectors of a spectrum (1 + i)^exponent: cosines, with signs so that two of them are nothing
// like each other.
struct Spectrum {
  double exponent;
  uint32_t sign_seed;

  double value(size_t i) const { return std::pow(1.0 + static_cast<double>(i), exponent); }
  double vector(size_t j, size_t i) const {
    const double angle =
        std::numbers::pi * (static_cast<double>(j) + 0.5) * static_cast<double>(i) / double{kDim};
    const bool flips = reference::kv_flips(static_cast<uint32_t>(j) + sign_seed);
    return (flips ? -1 : 1) * std::cos(angle) * std::sqrt((i == 0 ? 1.0 : 2.0) / double{kDim});
  }
  double mean() const {
    double sum = 0;
    for (size_t i = 0; i < kDim; ++i) sum += value(i);
    return sum / double{kDim};
  }
  // The matrix with a mean eigenvalue of 1, plus `floor`, to a power.
  Matrix power(double floor, double power) const {
    Matrix scaled(kDim * kDim), vectors(kDim * kDim);
    const double all = mean();
    for (size_t i = 0; i < kDim; ++i) {
      const double factor = std::pow(value(i) / all + floor, power);
      for (size_t j = 0; j < kDim; ++j) {
        vectors[i * kDim + j] = vector(j, i);
        scaled[j * kDim + i] = vector(j, i) * factor;
      }
    }
    return product(scaled, vectors);
  }
};

// Signs and Hadamard transform of each row.
Matrix rotated_rows(Matrix m) {
  for (size_t i = 0; i < kDim; ++i) {
    const std::span<double> row = std::span(m).subspan(i * kDim, kDim);
    for (size_t j = 0; j < kDim; ++j)
      row[j] *= (reference::kv_flips(static_cast<uint32_t>(j)) ? -1 : 1) / std::sqrt(double{kDim});
    reference::walsh_hadamard<double>(row);
  }
  return m;
}
Matrix transposed(const Matrix& m) {
  Matrix out(m.size());
  for (size_t i = 0; i < m.size(); ++i) out[i % kDim * kDim + i / kDim] = m[i];
  return out;
}

// The upper triangular T with m = T T^t, from its last column on.
Matrix upper_factor(Matrix m) {
  for (size_t k = kDim; k-- > 0;) {
    const double root = std::sqrt(m[k * kDim + k]);
    for (size_t i = 0; i < kDim; ++i) m[i * kDim + k] = i <= k ? m[i * kDim + k] / root : 0;
    for (size_t i = 0; i < k; ++i)
      for (size_t j = 0; j < k; ++j) m[i * kDim + j] -= m[i * kDim + k] * m[j * kDim + k];
  }
  return m;
}

class KvCalibratedAccuracy : public testing::Test {
 protected:
  // As gyre.calibrate has it: basis and floors are those of python/gyre/calibrate/solve.py.
  KvCalibratedAccuracy() {
    const Matrix basis = rows_.power(0.05, -0.3), inverse = rows_.power(0.05, 0.3);
    const Matrix costs = product(inverse, product(weights_, inverse));
    const Matrix factor = upper_factor(rotated_rows(transposed(rotated_rows(costs))));
    std::vector<float> diagonal(kDim), upper(kDim * kDim);
    for (size_t j = 0; j < kDim; ++j) {
      diagonal[j] = static_cast<float>(factor[j * kDim + j]);
      for (size_t i = 0; i < j; ++i)
        upper[i * kDim + j] = static_cast<float>(factor[i * kDim + j] / factor[j * kDim + j]);
    }
    calibration_ = {{tensor(basis), tensor(inverse), {}},
                    {tensor_of(device_, upper, {1, kDim, kDim}),
                     tensor_of(device_, diagonal, {1, kDim}),
                     {0.85f, 0.9f, 0.95f, 1.0f, 1.05f, 1.1f, 1.15f}}};
    const std::vector<float> normal = gaussian_rows(kRows, kDim, 1);
    x_.assign(kRows * kDim, 0.0f);
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < kDim; ++i) {
        const double size = std::sqrt(rows_.value(i)) * normal[row * kDim + i];
        for (size_t j = 0; j < kDim; ++j)
          x_[row * kDim + j] += static_cast<float>(size * rows_.vector(j, i));
      }
    }
  }

  Tensor tensor(const Matrix& values) const {
    return tensor_of(device_, std::vector<float>(values.begin(), values.end()), {1, kDim, kDim});
  }

  // Sum of e^t W e over rows e.
  double cost(const std::vector<float>& e) const {
    double sum = 0;
    for (size_t row = 0; row < kRows; ++row)
      for (size_t i = 0; i < kDim; ++i)
        for (size_t j = 0; j < kDim; ++j)
          sum += double{e[row * kDim + i]} * weights_[i * kDim + j] * e[row * kDim + j];
    return sum;
  }

  // The error of what a cache gives back, relative to the rows.
  double error(KvFormat format, KvRole role, const KvCalibration& calibration) const {
    const Tensor x = tensor_of(device_, x_, {kRows, 1, kDim}),
                 back = device_.tensor(x.dtype(), x.shape());
    const KvBuffer cache = KvBuffer::allocate(device_, {format, role, 1, kRows, kDim});
    Encoder encoder(device_);
    if (role == KvRole::k)
      kv_quantize(encoder, {.k = x, .k_cache = cache, .k_calibration = calibration});
    if (role == KvRole::v)
      kv_quantize(encoder, {.v = x, .v_cache = cache, .v_calibration = calibration});
    kv_dequantize(encoder, {cache, back});
    if (calibration.transform.defined())
      kv_transform(encoder, {.x = back, .matrix = calibration.transform.inverse, .out = back});
    encoder.submit().wait();
    std::vector<float> e = floats_of(back);
    for (size_t i = 0; i < e.size(); ++i) e[i] -= x_[i];
    return cost(e) / cost(x_);
  }

  const Device device_ = Device::open("cpu");
  const Spectrum rows_{-1.0, 0}, readers_{-0.8, 1000};
  const Matrix weights_ = readers_.power(0.03, 1);
  KvCalibration calibration_;
  std::vector<float> x_;
};

TEST_F(KvCalibratedAccuracy, RowsOf512LoseLess) {
  KvCalibration blocks_alone = calibration_;
  std::vector<float> factor = floats_of(calibration_.feedback.factor);
  for (size_t i = 0; i < factor.size(); ++i)
    if (i / kDim < 256 && i % kDim >= 256) factor[i] = 0;
  blocks_alone.feedback.factor = tensor_of(device_, factor, {1, kDim, kDim});
  for (const KvFormat format : {KvFormat::tq3, KvFormat::tq4, KvFormat::tq6}) {
    for (const KvRole role : {KvRole::k, KvRole::v}) {
      const double plain = error(format, role, {}), made = error(format, role, calibration_);
      const double apart = error(format, role, blocks_alone);
      std::cout << name(format) << (role == KvRole::k ? " k" : " v") << ": plain " << plain
                << ", calibrated " << made << ", without feedback between scale blocks " << apart
                << '\n';
      EXPECT_LT(made, 0.5 * plain);
      EXPECT_LT(made, apart);  // errors of the first block are made good in the second
    }
  }
}

}  // namespace
}  // namespace gyre::test
