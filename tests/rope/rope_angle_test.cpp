// How near the sines and cosines come at every position. The inputs are (1, 0) and (1, -1), so the
// first head's outputs are the cosines and sines themselves.
#include <complex>

#include "gyre_test.h"
#include "rope/rope_fixture.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

constexpr double kPromised = 2e-6;
// What the kernels keep while the frequency, a double, is not what limits them.
constexpr double kExpected = 2.5e-7;

constexpr uint64_t kMillion = 1 << 20;

// e^(i a) of any position up to 2^20 from two short tables: exact angles, one product of doubles.
class Circle {
 public:
  explicit Circle(long double frequency) {
    for (int64_t i = 0; i <= kStep; ++i) {
      small_.push_back(std::polar(1.0, reference::rope_angle(frequency, i)));
      large_.push_back(std::polar(1.0, reference::rope_angle(frequency, i * kStep)));
    }
  }
  std::complex<double> at(uint64_t position) const {
    return large_[position / kStep] * small_[position % kStep];
  }

 private:
  static constexpr int64_t kStep = 1024;
  std::vector<std::complex<double>> small_, large_;
};

class RopeAngle : public RopeTest, public testing::WithParamInterface<double> {
 protected:
  RopeOptions options() const { return {.base = GetParam()}; }

  // [tokens, 2, head_dim]: (1, 0) and (1, -1).
  Tensor unit_heads(uint64_t tokens, uint64_t head_dim) const {
    std::vector<float> input(tokens * 2 * head_dim, 0.0f);
    for (uint64_t i = 0; i < input.size(); ++i) {
      const bool first = i % head_dim < head_dim / 2, second_head = i / head_dim % 2 == 1;
      if (first) input[i] = 1;
      if (!first && second_head) input[i] = -1;
    }
    return filled(DType::f32, {tokens, 2, head_dim}, input);
  }

  // The largest error of one token's outputs.
  static double error(std::span<const float> out, std::span<const std::complex<double>> truth) {
    double worst = 0;
    const size_t pairs = truth.size();
    for (size_t p = 0; p < pairs; ++p) {
      const double c = truth[p].real(), s = truth[p].imag();
      const float* head = out.data() + p;
      worst = std::max({worst, std::abs(head[0] - c), std::abs(head[pairs] - s),
                        std::abs(head[2 * pairs] - (c + s)), std::abs(head[3 * pairs] - (s - c))});
    }
    return worst;
  }

  double error_up_to_a_million(uint64_t head_dim, uint64_t step) const {
    std::vector<Circle> circles;
    for (const long double f : reference::rope_frequencies(options(), head_dim))
      circles.emplace_back(f);
    constexpr uint64_t kTokens = 4096;
    const Tensor x = unit_heads(kTokens, head_dim);
    double worst = 0;
    for (uint64_t first = 0; first <= kMillion; first += kTokens * step) {
      std::vector<int32_t> at(kTokens);
      for (uint64_t t = 0; t < kTokens; ++t)
        at[t] = static_cast<int32_t>(std::min(first + t * step, kMillion));
      const Tensor out = rotated(x, positions(at), options());
      std::vector<std::complex<double>> truth(circles.size());
      for (uint64_t t = 0; t < kTokens; ++t) {
        for (size_t p = 0; p < truth.size(); ++p) truth[p] = circles[p].at(at[t]);
        const auto row = out.data<const float>().subspan(t * 2 * head_dim, 2 * head_dim);
        worst = std::max(worst, error(row, truth));
      }
    }
    return worst;
  }

  double error_at(const std::vector<int64_t>& at, DType dtype, uint64_t head_dim) const {
    const std::vector<long double> frequencies = reference::rope_frequencies(options(), head_dim);
    const Tensor where = device_.tensor(dtype, {at.size()});
    std::vector<int32_t> words(at.begin(), at.end());
    Bytes bytes(words.size() * 4);
    std::memcpy(bytes.data(), words.data(), bytes.size());
    write_bytes(where, bytes);
    const Tensor out = rotated(unit_heads(at.size(), head_dim), where, options());
    double worst = 0;
    for (size_t t = 0; t < at.size(); ++t) {
      std::vector<std::complex<double>> truth;
      for (const long double f : frequencies)
        truth.push_back(std::polar(1.0, reference::rope_angle(f, at[t])));
      const auto row = out.data<const float>().subspan(t * 2 * head_dim, 2 * head_dim);
      worst = std::max(worst, error(row, truth));
    }
    return worst;
  }

  // Powers of two with their neighbours, of both signs.
  static std::vector<int64_t> around_powers(int first, int last) {
    std::vector<int64_t> at;
    for (int power = first; power <= last; ++power) {
      for (const int64_t offset : {-1, 0, 1}) {
        const int64_t position = (int64_t{1} << power) + offset;
        at.push_back(position);
        at.push_back(-position);
      }
    }
    return at;
  }
};

TEST_P(RopeAngle, EveryPositionUpToAMillion) {
  static_assert(kExpected < kPromised);
  EXPECT_LE(error_up_to_a_million(8, 1), kExpected);
}

TEST_P(RopeAngle, AWholeHeadAtASampleOfPositions) {
  EXPECT_LE(error_up_to_a_million(128, 7), kExpected);
}

TEST_P(RopeAngle, PowersOfTwoAndTheirNeighbours) {
  EXPECT_LE(error_at(around_powers(0, 20), DType::i32, 128), kExpected);
  EXPECT_LE(error_at(around_powers(21, 30), DType::i32, 128), kPromised);
}

TEST_P(RopeAngle, TheEndsOfThePositions) {
  constexpr int64_t kTop = int64_t{1} << 31;
  EXPECT_LE(error_at({kTop - 1, -kTop, 1 - kTop, kTop - 2}, DType::i32, 128), kPromised);
  EXPECT_LE(error_at({kTop, kTop + 1, 3000000000, 2 * kTop - 1}, DType::u32, 128), kPromised);
}

INSTANTIATE_TEST_SUITE_P(Bases, RopeAngle, testing::Values(10000.0, 500000.0, 1e6, 1e7),
                         [](const auto& test) {
                           return "base_" + std::to_string(static_cast<int>(test.param));
                         });

using RopeAngleTable = RopeTest;

// A table is "exact at any position": what is left is the rounding of sine and cosine.
TEST_F(RopeAngleTable, ATableIsExactAtEveryPosition) {
  const std::vector<double> radians = {1.0, 0.5, 3.0, 6.25, 100.0, 0x1p-20, -2.5, -1e-9};
  const std::vector<uint32_t> at = {1u, 12345u, 1u << 20, 1u << 28, 0x7FFFFFFFu, 0xFFFFFFFFu};
  const Tensor where = device_.tensor(DType::u32, {at.size()});
  where.write_from(std::span<const uint32_t>(at));
  std::vector<float> input(at.size() * 16);
  for (size_t i = 0; i < input.size(); ++i) input[i] = i % 16 < 8 ? 1.0f : 0.0f;
  const Tensor x = filled(DType::f32, {at.size(), 1, 16}, input), out = like(x);
  run(RopeInputs{
      .x = x, .positions = where, .out = out, .frequencies = rope_table(device_, radians)});
  for (size_t t = 0; t < at.size(); ++t) {
    for (size_t p = 0; p < 8; ++p) {
      const double angle = reference::rope_angle(radians[p], at[t]);
      EXPECT_NEAR(out.data<float>()[t * 16 + p], std::cos(angle), kExpected)
          << radians[p] << " at " << at[t];
      EXPECT_NEAR(out.data<float>()[t * 16 + 8 + p], std::sin(angle), kExpected)
          << radians[p] << " at " << at[t];
    }
  }
}

struct Known {
  double base;
  uint32_t rotary_dim;
  uint64_t pair;
  int64_t position;
  double cosine, sine;
};

// Computed with 60 digits.
constexpr Known kKnown[] = {
    {10000, 128, 0, 1048576, 0.943808393901311984, 0.330493140021734672},
    {10000, 128, 1, 1048576, -0.677602420272102666, 0.735428419386542846},
    {500000, 128, 7, 1048575, 0.452639196534185497, -0.891693757834429946},
    {1000000, 64, 3, -999999, -0.0535197549898932829, -0.998566790868703881},
    {10000000, 128, 0, 2147483647, -0.688836691877943835, -0.724916555144556391},
    {10000, 64, 5, -2147483648, 0.981973110154282951, -0.189020662716869347},
    {500000, 128, 1, 4294967295, 0.430373315316534042, -0.902650989842394825},
    {10000000, 128, 20, 3000000000, 0.803639704594804359, -0.595116144293511487},
};

TEST(RopeReference, IsItselfRight) {
  for (const Known& known : kKnown) {
    const RopeOptions options{.base = known.base};
    const long double frequency =
        reference::rope_frequencies(options, known.rotary_dim)[known.pair];
    const double angle = reference::rope_angle(frequency, known.position);
    EXPECT_NEAR(std::cos(angle), known.cosine, 2e-9);
    EXPECT_NEAR(std::sin(angle), known.sine, 2e-9);
    if (known.position < 0 || known.position > static_cast<int64_t>(kMillion)) continue;
    const std::complex<double> point = Circle(frequency).at(static_cast<uint64_t>(known.position));
    EXPECT_NEAR(point.real(), known.cosine, 1e-12);
    EXPECT_NEAR(point.imag(), known.sine, 1e-12);
  }
}

}  // namespace
}  // namespace gyre::test
