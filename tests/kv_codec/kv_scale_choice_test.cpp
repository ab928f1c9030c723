// The scales of keys and values against those that might have been: error of attention outputs, in
// double precision over decoded caches whose rows are given other lengths. docs/kv_formats.md
// quotes the same with more caches.
#include <iostream>

#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_codec_reference.h"

namespace gyre::test {
namespace {

constexpr uint64_t kHeadDim = 128;
constexpr uint64_t kKeys = 4096;
constexpr uint64_t kQueries = 32;
constexpr uint32_t kCaches = 4;  // independent ones, errors averaged

using Rows = std::vector<double>;

// A cache of one head, decoded, and what its rows' scales are.
struct Calibrated {
  Rows rows;
  std::vector<double> scales;
};

Calibrated calibrated(KvFormat format, KvRole role, std::span<const float> x) {
  const KvBuffer cache = encoded(cpu(), format, kHeadDim, x, role);
  const auto rows = decoded(cpu(), cache);
  const auto bytes = bytes_of(cache.scales);
  Calibrated result{{rows.begin(), rows.end()}, {}};
  for (uint64_t slot = 0; slot < kKeys; ++slot) {
    const auto pattern = static_cast<uint16_t>(bytes[2 * slot] | bytes[2 * slot + 1] << 8);
    result.scales.push_back(reference::kv_scale_value(pattern));
  }
  return result;
}

enum class Scale {
  shipped,
  kept_length,  // ||x|| / ||levels||
  lloyd_max,    // where the magnitudes fit N(0, ||x||^2 / n) best
  unbiased,     // ||x||^2 / <x, levels>
};

Rows rescaled(const Calibrated& cache, std::span<const float> x, Scale scale, KvFormat format) {
  Rows rows = cache.rows;
  for (uint64_t slot = 0; scale != Scale::shipped && slot < kKeys; ++slot) {
    double* const y = &rows[slot * kHeadDim];
    double xx = 0, xy = 0, yy = 0;
    for (uint64_t j = 0; j < kHeadDim; ++j) {
      const double at = x[slot * kHeadDim + j];
      xx += at * at, xy += at * y[j], yy += y[j] * y[j];
    }
    const double lloyd_max = reference::kv_coder(name(format)).best_factor *
                             std::sqrt(xx / double{kHeadDim}) / cache.scales[slot];
    const double factor = scale == Scale::kept_length ? std::sqrt(xx / yy)
                          : scale == Scale::lloyd_max ? lloyd_max
                                                      : xx / xy;
    for (uint64_t j = 0; j < kHeadDim; ++j) y[j] *= factor;
  }
  return rows;
}

// [queries, keys], each row of sum 1. Logits of unit variance for N(0,1) queries and keys.
Rows probabilities(const Rows& queries, const Rows& keys) {
  Rows p(kQueries * kKeys);
  for (uint64_t q = 0; q < kQueries; ++q) {
    double sum = 0;
    for (uint64_t k = 0; k < kKeys; ++k) {
      double dot = 0;
      for (uint64_t j = 0; j < kHeadDim; ++j)
        dot += queries[q * kHeadDim + j] * keys[k * kHeadDim + j];
      sum += p[q * kKeys + k] = std::exp(dot / std::sqrt(double{kHeadDim}));
    }
    for (uint64_t k = 0; k < kKeys; ++k) p[q * kKeys + k] /= sum;
  }
  return p;
}

// For as many queries as there are rows of probabilities.
Rows outputs(const Rows& p, const Rows& values) {
  Rows out(p.size() / kKeys * kHeadDim, 0.0);
  for (uint64_t i = 0; i < p.size(); ++i) {
    double* const row = &out[i / kKeys * kHeadDim];
    const double* const value = &values[i % kKeys * kHeadDim];
    for (uint64_t j = 0; j < kHeadDim; ++j) row[j] += p[i] * value[j];
  }
  return out;
}

double squared_error(const Rows& got, const Rows& exact) {
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  return error / size;
}

Rows wide(std::span<const float> x) { return {x.begin(), x.end()}; }

// Relative squared error of outputs with keys under one scale, exact values.
double key_error(KvFormat format, Scale scale) {
  double error = 0;
  for (uint32_t i = 0; i < kCaches; ++i) {
    const auto keys = gaussian_rows(kKeys, kHeadDim, 10 * i + 1);
    const Rows values = wide(gaussian_rows(kKeys, kHeadDim, 10 * i + 2));
    const Rows queries = wide(gaussian_rows(kQueries, kHeadDim, 10 * i + 3));
    const Rows calibrated_keys = rescaled(calibrated(format, KvRole::k, keys), keys, scale, format);
    error += squared_error(outputs(probabilities(queries, calibrated_keys), values),
                           outputs(probabilities(queries, wide(keys)), values));
  }
  return error / kCaches;
}

// As key_error, with calibrated values and exact keys. Channel by channel the values have the mean
// +-mean; without queries every key counts the same.
double value_error(KvFormat format, Scale scale, float mean, bool uniform) {
  double error = 0;
  for (uint32_t i = 0; i < kCaches; ++i) {
    auto values = gaussian_rows(kKeys, kHeadDim, 10 * i + 4);
    const auto signs = gaussian_rows(1, kHeadDim, 10 * i + 5);
    for (size_t at = 0; at < values.size(); ++at)
      values[at] += std::copysign(mean, signs[at % kHeadDim]);
    const Rows p = uniform ? Rows(kKeys, 1 / double{kKeys})
                           : probabilities(wide(gaussian_rows(kQueries, kHeadDim, 10 * i + 6)),
                                           wide(gaussian_rows(kKeys, kHeadDim, 10 * i + 7)));
    const Rows calibrated_values =
        rescaled(calibrated(format, KvRole::v, values), values, scale, format);
    error += squared_error(outputs(p, calibrated_values), outputs(p, wide(values)));
  }
  return error / kCaches;
}

struct Choice {
  KvFormat format;
  double zero_mean_cost;  // at most, of the shipped scale of V over the one that keeps the length
  double mean_gain;       // at least, of the same, if the values have a mean
};

class KvScaleChoice : public testing::TestWithParam<Choice> {};

TEST_P(KvScaleChoice, KeysKeepTheirLength) {
  const KvFormat format = GetParam().format;
  const double shipped = key_error(format, Scale::shipped);
  const double kept = key_error(format, Scale::kept_length);
  const double plain = key_error(format, Scale::lloyd_max);
  const double unbiased = key_error(format, Scale::unbiased);
  std::cout << name(format) << " keys: shipped " << shipped << ", length kept " << kept
            << ", Lloyd-Max " << plain << ", unbiased " << unbiased << '\n';
  EXPECT_NEAR(shipped / kept, 1, 0.002);  // but for rounding to 16 bits
  if (format == KvFormat::tq2) return;    // of no use for keys
  EXPECT_LT(shipped, plain);
  EXPECT_LE(shipped, 1.03 * unbiased);
}

TEST_P(KvScaleChoice, ValuesWithoutAMeanLoseLittle) {
  const KvFormat format = GetParam().format;
  const double shipped = value_error(format, Scale::shipped, 0, false);
  const double kept = value_error(format, Scale::kept_length, 0, false);
  std::cout << name(format) << " values: shipped " << shipped << ", length kept " << kept
            << ", unbiased " << value_error(format, Scale::unbiased, 0, false) << ", Lloyd-Max "
            << value_error(format, Scale::lloyd_max, 0, false) << ", cost " << shipped / kept
            << '\n';
  EXPECT_LE(shipped, GetParam().zero_mean_cost * kept);
}

TEST_P(KvScaleChoice, ValuesWithAMeanGain) {
  const KvFormat format = GetParam().format;
  const double shipped = value_error(format, Scale::shipped, 0.3f, true);
  const double kept = value_error(format, Scale::kept_length, 0.3f, true);
  const double unbiased = value_error(format, Scale::unbiased, 0.3f, true);
  std::cout << name(format) << " values of mean 0.3: shipped " << shipped << ", length kept "
            << kept << ", unbiased " << unbiased << ", Lloyd-Max "
            << value_error(format, Scale::lloyd_max, 0.3f, true) << ", gain " << kept / shipped
            << '\n';
  EXPECT_GE(kept, GetParam().mean_gain * shipped);
  EXPECT_LE(shipped, 1.1 * unbiased);
}

INSTANTIATE_TEST_SUITE_P(Formats, KvScaleChoice,
                         testing::Values(Choice{KvFormat::tq2, 1.12, 5.5},
                                         Choice{KvFormat::tq3, 1.03, 2.7},
                                         Choice{KvFormat::tq4, 1.03, 1.5}),
                         [](const auto& test) { return std::string(name(test.param.format)); });

}  // namespace
}  // namespace gyre::test
