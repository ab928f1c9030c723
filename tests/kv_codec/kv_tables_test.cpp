// The shipped tables are what their derivation gives.
#include <iomanip>
#include <ostream>

#include "abi/kv_codec.h"
#include "abi/kv_mlx_native.h"
#include "format_classes.h"
#include "gyre_test.h"
#include "kv_codec/kv_mlx_native_reference.h"

namespace gyre::test {
namespace {

using reference::normal_density;
using reference::normal_tail;
using Levels = std::vector<int>;

struct Fit {
  double factor = 0, error = 0;
};

// The factor at which integer magnitudes, each used for what is nearest to it, have the least error
// on N(0,1).
Fit best_fit(const Levels& levels, double start) {
  Fit fit{start, 0};
  for (int step = 0; step < 2000; ++step) {
    double product = 0, square = 0, low = 0;
    for (size_t i = 0; i < levels.size(); ++i) {
      const double high =
          i + 1 == levels.size() ? 40 : fit.factor * (levels[i] + levels[i + 1]) / 2;
      product += levels[i] * (normal_density(low) - normal_density(high));
      square += levels[i] * levels[i] * (normal_tail(low) - normal_tail(high));
      low = high;
    }
    fit.error = 1 - 2 * product * product / square;
    const double next = product / square;
    if (std::abs(next - fit.factor) < 1e-17) break;
    fit.factor = next;
  }
  return fit;
}

// Integers that magnitudes may be. Those of 4 bits are odd, so that a level, plus or minus one of
// them, is 2 u - 107 with u of 7 bits; docs/kv_formats.md says what for.
enum class Grid { all, odd };

Grid grid_of(uint32_t bits) { return bits == 4 ? Grid::odd : Grid::all; }

int nearest(Grid grid, double x) {
  const double integer = grid == Grid::odd ? 2 * std::floor(x / 2) + 1 : std::floor(x + 0.5);
  return static_cast<int>(integer);
}

// All ways in which k * centroids rounds to integers of the grid up to 127, as k grows.
std::set<Levels> all_roundings(const std::vector<double>& centroids, Grid grid) {
  std::vector<double> changes;
  for (const double c : centroids) {
    for (int i = 0; i <= 127; ++i) changes.push_back((grid == Grid::odd ? 2 * i : i + 0.5) / c);
  }
  std::sort(changes.begin(), changes.end());
  std::set<Levels> all;
  for (size_t i = 0; i + 1 < changes.size(); ++i) {
    const double k = (changes[i] + changes[i + 1]) / 2;
    Levels levels;
    for (const double c : centroids) levels.push_back(nearest(grid, k * c));
    if (levels.back() <= 127 && levels.front() > 0) all.insert(levels);
  }
  return all;
}

// Least error; of equal ones (multiples of each other) the larger.
Levels best_rounding(uint32_t bits) {
  const std::vector<double> centroids = reference::mlx_native_centroids(bits);
  Levels best;
  double least = 1;
  for (const Levels& levels : all_roundings(centroids, grid_of(bits))) {
    const double error = best_fit(levels, centroids.back() / levels.back()).error;
    const bool equal = std::abs(error - least) < 1e-13;
    if (equal ? levels.back() > best.back() : error < least) {
      best = levels;
      least = error;
    }
  }
  return best;
}

struct NativeTable {
  uint32_t bits;
  std::span<const uint8_t> levels;
  std::span<const uint8_t> thresholds;
  float gain, stretch;
};

std::ostream& operator<<(std::ostream& out, const NativeTable& table) {
  return out << table.bits << " bits";
}

class NativeTables : public testing::TestWithParam<NativeTable> {};

reference::KvCoder coder_of(const NativeTable& table, bool values = false) {
  return reference::kv_coder("tq" + std::to_string(table.bits), values);
}

TEST_P(NativeTables, AreTheBestRoundingOfLloydMax) {
  const Levels best = best_rounding(GetParam().bits);
  const Levels shipped(GetParam().levels.begin(), GetParam().levels.end());
  EXPECT_EQ(shipped, best);
  EXPECT_EQ(coder_of(GetParam()).magnitudes, best);
}

TEST_P(NativeTables, ThresholdsAreTheSumsOfNeighbours) {
  const auto& [bits, levels, thresholds, gain, stretch] = GetParam();
  ASSERT_EQ(thresholds.size() + 1, levels.size());
  for (size_t i = 0; i < thresholds.size(); ++i)
    EXPECT_EQ(thresholds[i], levels[i] + levels[i + 1]);
}

TEST_P(NativeTables, GainIsTwiceTheBestFit) {
  const auto& [bits, levels, thresholds, gain, stretch] = GetParam();
  const Levels shipped(levels.begin(), levels.end());
  const double factor =
      best_fit(shipped, reference::mlx_native_centroids(bits).back() / shipped.back()).factor;
  EXPECT_EQ(gain, static_cast<float>(2 / factor)) << std::setprecision(17) << factor;
  EXPECT_NEAR(factor, coder_of(GetParam()).best_factor, 1e-15);
}

TEST_P(NativeTables, ValueStretchIsWhatTheErrorTakesAway) {
  const NativeTable& table = GetParam();
  const Levels shipped(table.levels.begin(), table.levels.end());
  const double error = best_fit(shipped, 2 / table.gain).error;
  EXPECT_EQ(table.stretch, static_cast<float>(1 / std::sqrt(1 - error)))
      << std::setprecision(17) << error;
  EXPECT_EQ(table.stretch, coder_of(table, true).stretch());
  EXPECT_EQ(1.0f, coder_of(table).stretch());
  EXPECT_NEAR(error, coder_of(table).error, 1e-14);
}

// Rounding must not cost what Lloyd-Max gains: a tenth of a percent for integers, four times that
// for odd ones, which are twice as far apart (and squared errors go by the square).
TEST_P(NativeTables, CostNextToNothing) {
  constexpr double kOptimum[] = {0, 0, 1.174818e-1, 3.454776e-2, 9.501008e-3};
  const auto& [bits, levels, thresholds, gain, stretch] = GetParam();
  const Levels shipped(levels.begin(), levels.end());
  const double error = best_fit(shipped, 2 / gain).error;
  EXPECT_LE(error, (grid_of(bits) == Grid::odd ? 1.004 : 1.001) * kOptimum[bits]);
  EXPECT_GE(error, 0.99999 * kOptimum[bits]);
}

INSTANTIATE_TEST_SUITE_P(Formats, NativeTables,
                         testing::Values(NativeTable{2, abi::kTq2Levels, abi::kTq2Thresholds,
                                                     abi::kv_codec(abi::kTq2).gain,
                                                     abi::kv_codec(abi::kTq2).value_stretch},
                                         NativeTable{3, abi::kTq3Levels, abi::kTq3Thresholds,
                                                     abi::kv_codec(abi::kTq3).gain,
                                                     abi::kv_codec(abi::kTq3).value_stretch},
                                         NativeTable{4, abi::kTq4Levels, abi::kTq4Thresholds,
                                                     abi::kv_codec(abi::kTq4).gain,
                                                     abi::kv_codec(abi::kTq4).value_stretch}),
                         [](const auto& test) { return "tq" + std::to_string(test.param.bits); });

struct MlxNativeTable {
  uint32_t bits;
  std::span<const float> centroids;
  double error;  // on N(0,1), as the specification states it
};

std::ostream& operator<<(std::ostream& out, const MlxNativeTable& table) {
  return out << table.bits << " bits";
}

class MlxNativeTables : public testing::TestWithParam<MlxNativeTable> {};

TEST_P(MlxNativeTables, AreTheirRegenerationToSevenDecimals) {
  const std::vector<double> centroids = reference::mlx_native_centroids(GetParam().bits);
  ASSERT_EQ(centroids.size(), GetParam().centroids.size());
  for (size_t i = 0; i < centroids.size(); ++i) {
    EXPECT_EQ(GetParam().centroids[i], static_cast<float>(reference::seven_decimals(centroids[i])))
        << i;
  }
}

TEST_P(MlxNativeTables, HaveTheStatedError) {
  const auto table = GetParam().centroids;
  double error = 1, low = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    const double high = i + 1 == table.size() ? 40 : (double{table[i]} + double{table[i + 1]}) / 2;
    error += 2 * double{table[i]} * double{table[i]} * (normal_tail(low) - normal_tail(high));
    error -= 4 * double{table[i]} * (normal_density(low) - normal_density(high));
    low = high;
  }
  EXPECT_NEAR(error / GetParam().error, 1, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Formats, MlxNativeTables,
                         testing::Values(MlxNativeTable{4, abi::kMlxNative4Centroids, 9.501008e-3},
                                         MlxNativeTable{5, abi::kMlxNative5Centroids, 2.504668e-3},
                                         MlxNativeTable{6, abi::kMlxNative6Centroids, 6.486489e-4},
                                         MlxNativeTable{8, abi::kMlxNative8Centroids, 6.274277e-5}),
                         [](const auto& test) {
                           return "mlx_native" + std::to_string(test.param.bits);
                         });

TEST(MlxNativeSigns, AreTheReferencesTable) {
  uint32_t in_256 = 0, in_512 = 0;
  for (uint32_t j = 0; j < 512; ++j) {
    const bool one = (abi::kMlxNativeSigns[j / 8] >> j % 8 & 1) != 0;
    EXPECT_EQ(one, reference::mlx_native_flips(j)) << j;
    in_512 += one ? 1 : 0;
    in_256 += one && j < 256 ? 1 : 0;
  }
  EXPECT_EQ(in_256, 132u);
  EXPECT_EQ(in_512, 263u);
}

// Version 1 is in caches on disk: the signs may never change.
TEST(NativeSigns, AreFrozen) {
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a over the bits
  uint32_t ones = 0;
  for (uint32_t j = 0; j < 1024; ++j) {
    ASSERT_EQ(abi::kv_sign_bit(j) == 1, reference::kv_flips(j)) << j;
    hash = (hash ^ abi::kv_sign_bit(j)) * 0x100000001B3u;
    ones += abi::kv_sign_bit(j);
  }
  EXPECT_EQ(abi::kKvSignsVersion, 1u);
  EXPECT_EQ(hash, 4688923596808299103u);
  EXPECT_EQ(ones, 486u);
}

// One largest magnitude must not fall into a bucket with another threshold: the coder looks at 16
// values at a time.
TEST(NativeThresholds, AreApartEnoughForTheCoder) {
  for (const auto thresholds :
       {std::span<const uint8_t>(abi::kTq3Thresholds), {abi::kTq4Thresholds}}) {
    std::set<int> buckets;
    for (const uint8_t t : thresholds) EXPECT_TRUE(buckets.insert(t / 16).second) << int{t};
  }
}

TEST(NativeLevels, OfEveryCode) {
  for (const KvFormat native : native_formats()) {
    const auto format = static_cast<uint32_t>(native);
    const reference::KvCoder coder = reference::kv_coder(name(native));
    EXPECT_EQ(abi::kv_bits(format), coder.bits);
    for (uint32_t code = 0; code < 1u << coder.bits; ++code) {
      EXPECT_EQ(abi::kv_level(format, code), reference::kv_level_of(coder, code))
          << name(native) << " " << code;
    }
    EXPECT_EQ(abi::kv_low_bits(format), coder.low_bits);
  }
}

TEST(Blocks, OfEveryHeadDim) {
  for (uint32_t head_dim = 16; head_dim <= 1024; head_dim += 8) {
    const auto spans = reference::kv_transform_spans(head_dim);
    const auto scales = reference::kv_scale_spans(head_dim);
    const abi::KvBlocks blocks = abi::kv_blocks(head_dim);
    const abi::KvScaleBlocks scale_blocks = abi::kv_scale_blocks(head_dim);
    ASSERT_EQ(blocks.count, spans.size()) << head_dim;
    ASSERT_EQ(scale_blocks.count, scales.size()) << head_dim;
    for (size_t i = 0; i < spans.size(); ++i) {
      EXPECT_EQ(blocks.begin[i], spans[i].begin);
      EXPECT_EQ(blocks.size[i], spans[i].size);
    }
    for (size_t i = 0; i < scales.size(); ++i) {
      EXPECT_EQ(scale_blocks.begin[i], scales[i].begin);
      EXPECT_EQ(scale_blocks.size[i], scales[i].size);
    }
  }
}

}  // namespace
}  // namespace gyre::test
