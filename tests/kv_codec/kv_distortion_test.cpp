// How far a decoded row is from the row, against theory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <map>
#include <string_view>

#include "format_classes.h"
#include "kv_codec/kv_codec_fixture.h"
#include "kv_codec/kv_codec_reference.h"

namespace gyre::test {
namespace {

constexpr uint64_t kVectors = 10000;

// Simpson's rule.
template <class Function>
double integral(const Function& f, double low, double high) {
  constexpr int kCells = 2000;
  const double step = (high - low) / kCells;
  double sum = f(low) + f(high);
  for (int i = 1; i < kCells; ++i) sum += f(low + i * step) * (i % 2 == 1 ? 4 : 2);
  return sum * step / 3;
}

// What calibration a coordinate does on average.
struct Moments {
  double product = 0;  // E[x L], L the level
  double square = 0;   // E[L^2]
  double removed = 0;  // E[L^2] times the part of n * error that a scale of one's own takes away
};

// density: of a coordinate, up to a factor, of variance 1.
template <class Density>
Moments moments(const reference::KvCoder& coder, const Density& density, double end) {
  double mass = 0, fourth = 0, low = 0;
  double mixed[5][5] = {};  // E[L^i x^j]
  for (size_t c = 0; c < coder.magnitudes.size(); ++c) {
    const double level = coder.magnitudes[c];
    const bool last = c + 1 == coder.magnitudes.size();
    const double high = last ? end : coder.best_factor * (level + coder.magnitudes[c + 1]) / 2;
    const auto power = [&](int j) {
      return integral([&](double x) { return std::pow(x, j) * density(x); }, low, high);
    };
    mass += power(0);
    fourth += power(4);
    for (int i = 1; i <= 4; ++i) {
      for (int j = 0; j <= 3; ++j) mixed[i][j] += std::pow(level, i) * power(j);
    }
    low = high;
  }
  for (auto& row : mixed) {
    for (double& value : row) value /= mass;
  }
  // The block's scale takes away what of g = L (x - t L), of mean 0, adds up over a block; what
  // goes with x^2 does not count, because the length of the block is given.
  const double t = mixed[1][1] / mixed[2][0];
  const double variance = mixed[2][2] - 2 * t * mixed[3][1] + t * t * mixed[4][0];
  const double with_square = mixed[1][3] - t * mixed[2][2];
  return {mixed[1][1], mixed[2][0], variance - with_square * with_square / (fourth / mass - 1)};
}

// The norm-preserving scale leaves 2 - 2 cos, and 1 - cos^2 is the error of the best scale.
double kept_norm(double error) { return 2 - 2 * std::sqrt(1 - error); }

// A coordinate of a random vector of length sqrt(n) has the density (1 - x^2 / n)^((n - 3) / 2),
// which tends to the Gaussian. The second term is what the scale gains by being the block's own; it
// matters in small blocks.
double sphere_theory(const reference::KvCoder& coder, uint64_t n) {
  const auto size = static_cast<double>(n);
  const auto density = [&](double x) {
    return std::pow(std::max(0.0, 1 - x * x / size), (size - 3) / 2);
  };
  const Moments m = moments(coder, density, std::sqrt(size));
  return kept_norm(1 - m.product * m.product / m.square - m.removed / m.square / size);
}

double gaussian_theory(const reference::KvCoder& coder) {
  const Moments m = moments(
      coder, [](double x) { return std::exp(-x * x / 2); }, 12);
  return kept_norm(1 - m.product * m.product / m.square);
}

// 256 coordinates under one largest magnitude cost more than 128.
double integer_bound(KvFormat format, uint64_t head_dim) {
  const std::map<std::string_view, std::pair<double, double>> bounds = {
      {"tq5", {3.2e-3, 3.5e-3}},
      {"tq6", {7.5e-4, 8.1e-4}},
      {"tq8", {4.5e-5, 5.0e-5}},
  };
  const auto [at_128, at_256] = bounds.at(name(format));
  return head_dim <= 128 ? at_128 : at_256;
}

Distortion gaussian_distortion(KvFormat format, uint64_t head_dim) {
  static std::map<std::pair<KvFormat, uint64_t>, Distortion> known;
  const auto [place, fresh] = known.try_emplace({format, head_dim});
  if (fresh)
    place->second = round_trip(cpu(), format, head_dim, gaussian_rows(kVectors, head_dim, 1));
  return place->second;
}

class KvDistortion : public testing::TestWithParam<uint64_t> {};

TEST_P(KvDistortion, OfGaussianRowsIsTheory) {
  const uint64_t head_dim = GetParam();
  for (const KvFormat format : native_formats()) {
    const reference::KvCoder coder = reference::kv_coder(name(format));
    if (coder.magnitudes.empty()) continue;
    const Distortion got = gaussian_distortion(format, head_dim);
    const double theory = sphere_theory(coder, std::min<uint64_t>(head_dim, 256));
    std::cout << name(format) << " at " << head_dim << ": " << got.error << ", theory " << theory
              << ", Gaussian limit " << gaussian_theory(coder) << ", cosine "
              << std::setprecision(7) << got.cosine << std::setprecision(6) << '\n';
    EXPECT_NEAR(got.error / theory, 1, 0.01) << name(format);
    EXPECT_NEAR((1 - got.cosine) / (theory / 2), 1, 0.01) << name(format);
  }
}

TEST_P(KvDistortion, OfGaussianRowsWithIntegerLevelsIsBounded) {
  const uint64_t head_dim = GetParam();
  for (const KvFormat format : native_formats()) {
    if (!reference::kv_coder(name(format)).magnitudes.empty()) continue;
    const Distortion got = gaussian_distortion(format, head_dim);
    const double bound = integer_bound(format, head_dim);
    std::cout << name(format) << " at " << head_dim << ": " << got.error << ", bound " << bound
              << ", cosine " << std::setprecision(7) << got.cosine << std::setprecision(6) << '\n';
    EXPECT_LE(got.error, bound) << name(format);
    EXPECT_GE(got.error, bound / 2) << name(format) << ": too good to be this format";
    EXPECT_GE(got.cosine, 1 - bound / 2) << name(format);
  }
}

// More bits, less error; and the decoded row has the length of the row.
TEST_P(KvDistortion, FallsWithEveryBitAndKeepsTheLength) {
  const uint64_t head_dim = GetParam();
  const auto rows = gaussian_rows(100, head_dim, 5);
  std::map<uint32_t, double> best = {{1, 1.0}};  // by bits
  for (const KvFormat format : native_formats()) {
    const double error = gaussian_distortion(format, head_dim).error;
    const uint32_t bits = describe(format).bits;
    EXPECT_LT(error, std::prev(best.lower_bound(bits))->second / 2.5) << name(format);
    best[bits] = std::min(error, best.try_emplace(bits, error).first->second);
    const auto back = decoded(cpu(), encoded(cpu(), format, head_dim, rows));
    for (uint64_t r = 0; r < 100; ++r) {
      double xx = 0, yy = 0;
      for (uint64_t j = r * head_dim; j < (r + 1) * head_dim; ++j) {
        xx += double{rows[j]} * rows[j];
        yy += double{back[j]} * back[j];
      }
      EXPECT_NEAR(yy / xx, 1, 0x1p-8) << name(format);  // the scale is rounded to 9 bits
    }
  }
}

using Maker = void (*)(std::mt19937& random, uint64_t row, std::span<float> x);

struct Structure {
  const char* name;
  uint64_t rows;
  Maker make;
};

float normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }

constexpr Structure kStructures[] = {
    {"constant", 1,
     [](std::mt19937&, uint64_t, std::span<float> x) { std::fill(x.begin(), x.end(), 0.7f); }},
    {"alternating", 1,
     [](std::mt19937&, uint64_t, std::span<float> x) {
       for (size_t j = 0; j < x.size(); ++j) x[j] = j % 2 == 0 ? 1.3f : -1.3f;
     }},
    {"two halves", 1,
     [](std::mt19937&, uint64_t, std::span<float> x) {
       for (size_t j = 0; j < x.size(); ++j) x[j] = j < x.size() / 2 ? -1.0f : 1.0f;
     }},
    {"one-hot", 256,
     [](std::mt19937&, uint64_t row, std::span<float> x) {
       x[row % x.size()] = row % 2 == 0 ? 5.0f : -5.0f;
     }},
    {"sparse", 500,
     [](std::mt19937& random, uint64_t, std::span<float> x) {
       for (size_t i = 0; i < x.size() / 16; ++i) x[random() % x.size()] = normal(random);
     }},
    {"heavy-tailed", 500,
     [](std::mt19937& random, uint64_t, std::span<float> x) {
       for (float& v : x) v = normal(random) / (std::fabs(normal(random)) + 1e-3f);
     }},
    {"outlier channels", 500,
     [](std::mt19937& random, uint64_t, std::span<float> x) {
       for (size_t j = 0; j < x.size(); ++j) x[j] = normal(random) * (j % 37 == 5 ? 50.0f : 1.0f);
     }},
    {"walsh", 256,
     [](std::mt19937&, uint64_t row, std::span<float> x) {
       for (size_t j = 0; j < x.size(); ++j) x[j] = __builtin_parityll(j & row) == 0 ? 0.4f : -0.4f;
     }},
};

// Mean error of each kind of row, at most `bound` times that of Gaussian rows.
void expect_structured_rows_within(double bound, uint64_t head_dim) {
  for (const Structure& structure : kStructures) {
    std::mt19937 random(3);
    const uint64_t count = std::min(structure.rows, std::max<uint64_t>(head_dim, 256));
    std::vector<float> rows(count * head_dim, 0.0f);
    for (uint64_t r = 0; r < count; ++r)
      structure.make(random, r, std::span(rows).subspan(r * head_dim, head_dim));
    std::cout << structure.name << " at " << head_dim << ":";
    for (const KvFormat format : native_formats()) {
      const double ratio = round_trip(cpu(), format, head_dim, rows).error /
                           gaussian_distortion(format, head_dim).error;
      std::cout << ' ' << name(format) << ' ' << std::setprecision(3) << ratio
                << std::setprecision(6);
      EXPECT_LE(ratio, bound) << structure.name << ' ' << name(format);
    }
    std::cout << '\n';
  }
}

TEST_P(KvDistortion, OfStructuredRowsIsNearThatOfGaussianOnes) {
  expect_structured_rows_within(1.3, GetParam());
}

// The worst row of a fixed rotation is a rotated axis: all of it falls into one coordinate, which
// has the largest level, and the others, which are 0, have the smallest.
TEST_P(KvDistortion, OfARotatedAxisIsWhatTheLevelsSay) {
  const uint64_t head_dim = GetParam();
  std::vector<float> axes(head_dim * head_dim, 0.0f);
  for (uint64_t j = 0; j < head_dim; ++j) axes[j * head_dim + j] = 1;
  const Tensor x = tensor_of(cpu(), axes, {head_dim, head_dim});
  hadamard(RunNow(cpu()), {x, x},
           {.direction = HadamardDirection::inverse, .signs = HadamardSigns::native});
  const auto rows = floats_of(x);
  for (const KvFormat format : native_formats()) {
    const reference::KvCoder coder = reference::kv_coder(name(format));
    double min = 127, max = 0;
    for (uint32_t code = 0; code < 1u << coder.bits; ++code) {
      const double level = std::abs(reference::kv_level_of(coder, code));
      if (level > 127) continue;  // tq8 has no code for -128
      min = std::min(min, level), max = std::max(max, level);
    }
    const auto others = static_cast<double>(std::min<uint64_t>(head_dim, 256) - 1);
    const double expected = 2 - 2 * max / std::sqrt(max * max + others * min * min);
    const double error = round_trip(cpu(), format, head_dim, rows).error;
    std::cout << "rotated axis at " << head_dim << ": " << name(format) << ' ' << error << '\n';
    EXPECT_NEAR(error, expected, 0.01 * expected + 1e-5) << name(format);
  }
}

// Blocks of 8 to 32 coordinates are too few for the rotation to make anything Gaussian, and head
// dims that are no power of two have such blocks, with scales of their own.
class KvSmallBlockDistortion : public testing::TestWithParam<uint64_t> {};

TEST_P(KvSmallBlockDistortion, OfStructuredRowsIsWithinThreeTimesThatOfGaussianOnes) {
  expect_structured_rows_within(3.0, GetParam());
}

INSTANTIATE_TEST_SUITE_P(HeadDims, KvSmallBlockDistortion,
                         testing::Values(16, 24, 32, 40, 80, 96, 112, 136, 160, 576),
                         [](const auto& test) { return std::to_string(test.param); });

INSTANTIATE_TEST_SUITE_P(HeadDims, KvDistortion, testing::Values(64, 128, 256, 512),
                         [](const auto& test) { return std::to_string(test.param); });

}  // namespace
}  // namespace gyre::test
