#pragma once
// The mlx-native formats as the specification describes them, in double precision.

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "kv_codec/kv_codec_reference.h"

namespace gyre::reference {

inline double normal_density(double x) {
  return std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
}
inline double normal_tail(double x) { return std::erfc(x / std::sqrt(2.0)) / 2; }

// One step of Lloyd's iteration on the positive half of a symmetric codebook for N(0,1).
inline void lloyd_step(std::vector<double>& centroids) {
  std::vector<double> bounds = {0};
  for (size_t i = 1; i < centroids.size(); ++i)
    bounds.push_back((centroids[i - 1] + centroids[i]) / 2);
  bounds.push_back(40);
  for (size_t i = 0; i < centroids.size(); ++i) {
    centroids[i] = (normal_density(bounds[i]) - normal_density(bounds[i + 1])) /
                   (normal_tail(bounds[i]) - normal_tail(bounds[i + 1]));
  }
}

inline double normal_quantile(double probability) {
  double low = -40, high = 40;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (1 - normal_tail(middle) < probability ? low : high) = middle;
  }
  return (low + high) / 2;
}

// Means of the cells between quantiles; the last cell is open.
inline std::vector<double> quantile_start(size_t half) {
  std::vector<double> centroids;
  for (size_t i = 0; i < half; ++i) {
    const double count = 2.0 * static_cast<double>(half);
    const double low = normal_quantile(static_cast<double>(half + i) / count);
    const double high =
        i + 1 == half ? 40 : normal_quantile(static_cast<double>(half + i + 1) / count);
    centroids.push_back((normal_density(low) - normal_density(high)) /
                        (normal_tail(low) - normal_tail(high)));
  }
  return centroids;
}

// The reference library's codebooks: 2 to 4 bits converged, the others where it stopped.
inline std::vector<double> mlx_native_centroids(uint32_t bits) {
  const size_t half = size_t{1} << (bits - 1);
  std::vector<double> centroids = quantile_start(half);
  if (bits == 8) {
    for (size_t i = 0; i < half; ++i) centroids[i] = (static_cast<double>(i) + 0.5) * 8 / 256;
  }
  const int steps = bits <= 4 ? 20000 : (bits == 8 ? 2000 : 1000);
  for (int i = 0; i < steps; ++i) lloyd_step(centroids);
  return centroids;
}

inline double seven_decimals(double value) { return std::round(value * 1e7) / 1e7; }

// All centroids in order, to seven decimals.
inline std::vector<double> mlx_native_codebook(uint32_t bits) {
  const std::vector<double> half = mlx_native_centroids(bits);
  std::vector<double> all;
  for (size_t i = half.size(); i-- > 0;) all.push_back(-seven_decimals(half[i]));
  for (const double c : half) all.push_back(seven_decimals(c));
  return all;
}

// Where codes change, in order. The reference library took them from the centroids before it
// rounded these; at 4 bits from those that it prints.
inline std::vector<double> mlx_native_midpoints(uint32_t bits) {
  const std::vector<double> half = mlx_native_centroids(bits);
  std::vector<double> all(2 * half.size() - 1);
  for (size_t i = 0; i + 1 < half.size(); ++i) {
    double middle = seven_decimals((half[i] + half[i + 1]) / 2);
    if (bits == 4) {  // in units of the last printed digit, a half goes up
      const int64_t a = std::llround(half[i] * 1e7), b = std::llround(half[i + 1] * 1e7);
      middle = static_cast<double>((a + b + 1) / 2) / 1e7;
    }
    all[half.size() + i] = middle;
    all[half.size() - 2 - i] = -middle;
  }
  return all;
}

// Midpoints of the codebook with this many centroids.
inline const std::vector<double>& midpoints_of(const std::vector<double>& codebook) {
  static const std::vector<double> kMidpoints[] = {mlx_native_midpoints(4), mlx_native_midpoints(5),
                                                   mlx_native_midpoints(6),
                                                   mlx_native_midpoints(8)};
  const size_t count = codebook.size();
  return kMidpoints[count == 16 ? 0 : count == 32 ? 1 : count == 64 ? 2 : 3];
}

inline bool mlx_native_flips(uint32_t coordinate) {
  constexpr uint64_t kRows[] = {0xa73b91f46dc2580e, 0xb37f24d68945ea1c, 0x63afd852970be13d,
                                0x76c419fe4a852cdb, 0xd34ea8179c5be631, 0x72b90df5438a6ec7,
                                0x582f94e1b63d0a7c, 0xc561d84fa3971e85};
  const uint64_t byte = kRows[coordinate / 64] >> (56 - coordinate % 64 / 8 * 8) & 255;
  return (byte >> coordinate % 8 & 1) != 0;
}

// A row in the rotated domain, its norms, and what the quantizer sees.
struct MlxNativeRow {
  std::vector<double> norms, normalized;
};

inline MlxNativeRow mlx_native_normalize(std::span<const float> x, float scale_factor) {
  const size_t n = x.size();
  std::vector<double> y(x.begin(), x.end());
  if (n == 256 || n == 512) {
    for (uint32_t j = 0; j < n; ++j) y[j] = mlx_native_flips(j) ? -y[j] : y[j];
  }
  walsh_hadamard<double>(y);
  for (double& v : y) v /= std::sqrt(static_cast<double>(n));
  MlxNativeRow row;
  const size_t block = n == 512 ? 256 : n;
  for (size_t begin = 0; begin < n; begin += block) {
    double sum = 0;
    for (size_t j = begin; j < begin + block; ++j) sum += y[j] * y[j];
    const double norm = std::sqrt(n == 512 ? sum / 256 : sum);
    const double factor =
        norm > 1e-10 ? (n == 512 ? scale_factor : std::sqrt(static_cast<double>(n))) / norm : 0;
    row.norms.push_back(norm);
    for (size_t j = begin; j < begin + block; ++j) row.normalized.push_back(y[j] * factor);
  }
  return row;
}

// Midpoints strictly below the value; `near` says that rounding may decide
// otherwise.
struct MlxNativeIndex {
  uint32_t index = 0;
  bool near = false;
};

inline MlxNativeIndex mlx_native_index(const std::vector<double>& codebook, double value) {
  MlxNativeIndex found;
  for (const double middle : midpoints_of(codebook)) {
    if (middle < value) ++found.index;
    found.near = found.near ||
                 (value != 0 && std::abs(middle - value) <= 1e-6 * std::max(1.0, std::abs(value)));
  }
  return found;
}

// The row that is quantized, in f32 and in the specification's order of operations.
inline std::vector<float> mlx_native_rotated_row(std::span<const float> x) {
  const size_t n = x.size();
  std::vector<float> y(x.begin(), x.end());
  for (uint32_t j = 0; (n == 256 || n == 512) && j < n; ++j)
    y[j] = mlx_native_flips(j) ? -y[j] : y[j];
  for (size_t step = 1; step < n; step *= 2) butterfly_stage(std::span<float>(y), step);
  for (float& value : y) value *= 1.0f / std::sqrt(static_cast<float>(n));
  return y;
}

// Norms to the bit. At 256 and 512 thirty-two threads sum n / 32 squares each, elsewhere each
// thread has one; then the upper half of the sums is added to the lower, until one is left.
inline std::vector<float> mlx_native_norms(std::span<const float> x) {
  const size_t n = x.size(), each = n == 256 || n == 512 ? n / 32 : 1;
  const std::vector<float> y = mlx_native_rotated_row(x);
  std::vector<float> norms;
  const size_t block = n == 512 ? 256 : n;
  for (size_t begin = 0; begin < n; begin += block) {
    std::vector<float> sums;
    for (size_t first = begin; first < begin + block; first += each) {
      float sum = 0;
      for (size_t j = first; j < first + each; ++j) sum += y[j] * y[j];
      sums.push_back(sum);
    }
    while (sums.size() > 1) {
      const size_t half = sums.size() / 2;
      for (size_t i = 0; i < half; ++i) sums[i] += sums[half + i];
      sums.resize(half);
    }
    norms.push_back(std::sqrt(n == 512 ? sums[0] / 256.0f : sums[0]));
  }
  return norms;
}

// Codes of a row, given the norms.
inline std::vector<uint32_t> mlx_native_codes(std::span<const float> x,
                                              std::span<const float> norms,
                                              const std::vector<double>& codebook,
                                              float scale_factor) {
  const size_t n = x.size();
  const bool fast = n == 256 || n == 512;
  const std::vector<float> y = mlx_native_rotated_row(x);
  const float root = std::sqrt(static_cast<float>(n));
  std::vector<float> middles;
  for (const double middle : midpoints_of(codebook)) middles.push_back(static_cast<float>(middle));
  std::vector<uint32_t> codes;
  for (size_t j = 0; j < n; ++j) {
    const float rotated = y[j], norm = norms[n == 512 ? j / 256 : 0];
    const float inverse = norm > 1e-10f ? 1.0f / norm : 0.0f;
    float value = norm > 1e-10f ? rotated / norm * root : 0.0f;
    if (fast) value = rotated * inverse * (n == 512 ? scale_factor : 16.0f);
    uint32_t code = 0;
    for (const float middle : middles) code += middle < value ? 1 : 0;
    codes.push_back(code);
  }
  return codes;
}

// What a row of codes stands for: centroids times norms, and the transform back.
inline std::vector<double> mlx_native_restored(std::span<const uint32_t> codes,
                                               std::span<const float> norms,
                                               const std::vector<double>& codebook,
                                               float scale_factor) {
  const size_t n = codes.size();
  const double root = std::sqrt(static_cast<double>(n));
  std::vector<double> y;
  for (size_t j = 0; j < n; ++j) {
    const double norm = n == 512 ? norms[j / 256] / double{scale_factor} : norms[0] / root;
    y.push_back(codebook[codes[j]] * norm);
  }
  walsh_hadamard<double>(y);
  for (double& v : y) v /= root;
  for (uint32_t j = 0; (n == 256 || n == 512) && j < n; ++j)
    y[j] = mlx_native_flips(j) ? -y[j] : y[j];
  return y;
}

// What mlx_native_restored() gave, still rotated.
inline std::vector<double> mlx_native_rotated(std::vector<double> x) {
  const size_t n = x.size();
  for (uint32_t j = 0; (n == 256 || n == 512) && j < n; ++j)
    x[j] = mlx_native_flips(j) ? -x[j] : x[j];
  walsh_hadamard<double>(x);
  for (double& v : x) v /= std::sqrt(static_cast<double>(n));
  return x;
}

}  // namespace gyre::reference
