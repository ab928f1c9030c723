// What compression costs the output: NMSE against double precision over the unquantized cache.
#include "attention/attention_fixture.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

Device device() { return Device::open("cpu"); }

// 32 query heads over 8, N(0, 1) keys and values, logits of unit variance.
AttentionCase long_case(KvFormat k, KvFormat v, uint32_t outliers = 0) {
  return {.heads = 32,
          .kv_heads = 8,
          .k_dim = 128,
          .length = 4096,
          .k = k,
          .v = v,
          .outliers = outliers};
}

AttentionCase short_case(KvFormat format) {
  AttentionCase c = long_case(format, format);
  c.heads = 12;
  c.kv_heads = 3;
  return c;
}

std::vector<double> output_of(const AttentionProblem& problem) {
  problem.record(RunNow(problem.device()));
  return problem.doubles_of(problem.inputs.out);
}

double error_of(const AttentionCase& c) {
  const AttentionProblem problem(device(), c);
  return nmse(output_of(problem), reference::attention(problem.shape(), problem.data()).out);
}

struct Line {
  KvFormat k, v;
  double bound;
};

constexpr Line kLines[] = {{KvFormat::tq8, KvFormat::tq8, 1.3e-4},
                           {KvFormat::tq4, KvFormat::tq4, 2.1e-2},
                           {KvFormat::tq3, KvFormat::tq3, 8e-2},
                           {KvFormat::tq8, KvFormat::tq4, 1.1e-2}};

// Means over three draws of each line's error: with outliers a few heads decide the sum. The draws
// do not depend on the format, so all lines share one reference.
std::vector<double> mean_errors(uint32_t outliers) {
  std::vector<double> errors(std::size(kLines));
  for (const uint32_t seed : {1u, 2u, 3u}) {
    reference::AttentionResult wanted;
    for (size_t i = 0; i < std::size(kLines); ++i) {
      AttentionCase c = long_case(kLines[i].k, kLines[i].v, outliers);
      c.seed = seed;
      const AttentionProblem problem(device(), c);
      if (wanted.out.empty()) wanted = reference::attention(problem.shape(), problem.data());
      errors[i] += nmse(output_of(problem), wanted.out) / 3;
    }
  }
  return errors;
}

TEST(AttentionAccuracy, CompressedCachesStayWithinTheirBounds) {
  const std::vector<double> errors = mean_errors(0);
  for (size_t i = 0; i < errors.size(); ++i) {
    const Line& line = kLines[i];
    EXPECT_LE(errors[i], line.bound) << name(line.k) << "/" << name(line.v);
    // Better than its bits allow would mean that the comparison is with the wrong thing.
    EXPECT_GE(errors[i], line.bound / 3) << name(line.k) << "/" << name(line.v);
  }
}

TEST(AttentionAccuracy, OutlierChannelsDoNotMatter) {
  const std::vector<double> errors = mean_errors(4);
  for (size_t i = 0; i < errors.size(); ++i) {
    const Line& line = kLines[i];
    EXPECT_LE(errors[i], 1.3 * line.bound) << name(line.k) << "/" << name(line.v);
  }
}

// Blocks of 32 along the head with one scale: the largest entry becomes 7 or -7.
void quantize_plainly(std::vector<double>& values) {
  for (size_t first = 0; first < values.size(); first += 32) {
    double largest = 0;
    for (size_t i = first; i < first + 32; ++i) largest = std::max(largest, std::fabs(values[i]));
    const double scale = largest / 7;
    for (size_t i = first; i < first + 32; ++i)
      values[i] = scale == 0 ? 0 : scale * std::round(values[i] / scale);
  }
}

double plain_error(uint32_t outliers, uint32_t seed) {
  AttentionCase c = long_case(KvFormat::f32, KvFormat::f32, outliers);
  c.capacity = c.length;
  c.seed = seed;
  const AttentionProblem problem(device(), c);
  reference::AttentionData data = problem.data();
  const reference::AttentionResult wanted = reference::attention(problem.shape(), data);
  quantize_plainly(data.k);
  quantize_plainly(data.v);
  return nmse(reference::attention(problem.shape(), data).out, wanted.out);
}

// What the rotation is for: as many bits without it, over the draws of the tests above.
TEST(AttentionAccuracy, APlainFourBitQuantizerFailsOnOutliers) {
  EXPECT_LE(plain_error(0, 1), 2.5e-2);
  EXPECT_GE((plain_error(4, 1) + plain_error(4, 2) + plain_error(4, 3)) / 3, 0.1);
}

// Every bit more takes the error down by about four.
TEST(AttentionAccuracy, EveryBitCounts) {
  constexpr KvFormat kFormats[] = {KvFormat::tq2, KvFormat::tq3, KvFormat::tq4, KvFormat::tq5,
                                   KvFormat::tq6};
  constexpr double kBounds[] = {0.3, 8e-2, 2.1e-2, 6.5e-3, 2e-3};
  double last = 1;
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    const double error = error_of(short_case(kFormats[i]));
    EXPECT_LE(error, kBounds[i]) << name(kFormats[i]);
    EXPECT_LE(error, last / 2.5) << name(kFormats[i]);
    last = error;
  }
  EXPECT_LE(error_of(short_case(KvFormat::tq8)), last / 6);
}

// The reference's formats at the same bits: no better, but not far.
TEST(AttentionAccuracy, MlxNativeFormats) {
  constexpr Line kMlxNative[] = {{KvFormat::mlx_native4, KvFormat::mlx_native4, 2.5e-2},
                                 {KvFormat::mlx_native5, KvFormat::mlx_native5, 8e-3},
                                 {KvFormat::mlx_native6, KvFormat::mlx_native6, 2.5e-3},
                                 {KvFormat::mlx_native8, KvFormat::mlx_native8, 3e-4}};
  for (const Line& line : kMlxNative) {
    AttentionCase c = long_case(line.k, line.v);
    c.k_dim = 256;
    c.heads = 4;
    c.kv_heads = 1;
    EXPECT_LE(error_of(c), line.bound) << name(line.k);
  }
}

// Many queries take another way through the keys.
TEST(AttentionAccuracy, PrefillIsAsGood) {
  for (const Line& line : kLines) {
    AttentionCase c = long_case(line.k, line.v);
    c.tokens = 24;
    c.heads = 4;
    c.kv_heads = 1;
    c.length = 2048;
    EXPECT_LE(error_of(c), line.bound) << name(line.k) << "/" << name(line.v);
  }
}

// Accumulating values in f16 would lose three digits here.
TEST(AttentionAccuracy, LongDenseCachesLoseNothing) {
  for (const KvFormat format : {KvFormat::f16, KvFormat::f32, KvFormat::bf16}) {
    AttentionCase c = long_case(format, format);
    c.heads = 2;
    c.kv_heads = 1;
    c.length = 65536;
    // bf16 itself costs 2^-18 of a value's square, in K and in V; f16 2^-24.
    EXPECT_LE(error_of(c), format == KvFormat::bf16 ? 1e-5 : 1e-6) << name(format);
  }
}

}  // namespace
}  // namespace gyre::test
