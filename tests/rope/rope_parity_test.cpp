// The rotary functions of the reference library, each as the Gyre call that replaces it, compared
// with the formulas of the specification (sections 5.1 to 5.3) as they are printed there, and held
// to its tolerances.
#include <gtest/gtest.h>

#include <functional>

#include "expect_error.h"
#include "rope/rope_fixture.h"

namespace gyre::test {
namespace {

constexpr uint64_t kT = 7;
constexpr uint64_t kH = 3;
constexpr uint64_t kD = 32;
constexpr uint64_t kR = 20;  // under partial rotary
constexpr double kTheta = 10000;
constexpr float kEps = 1e-6f;

// The tolerance of the specification for f32; for the narrow dtypes half a step of values up to 4.
double tolerance(DType dtype) {
  if (dtype == DType::f32) return 1e-5;
  return dtype == DType::f16 ? 0x1p-10 + 1e-5 : 0x1p-7 + 1e-5;
}

void turn(std::vector<double>& x, uint64_t u, uint64_t v, double angle) {
  const double a = x[u];
  const double b = x[v];
  x[u] = a * std::cos(angle) - b * std::sin(angle);
  x[v] = a * std::sin(angle) + b * std::cos(angle);
}

double angle_of(double position, double index, double denominator) {
  return position / std::pow(kTheta, 2 * index / denominator);
}

class RopeParity : public RopeTest {
 protected:
  // Rows t*H + h; small positions, as the reference's tests have them.
  using Row = std::function<void(uint64_t t, std::vector<double>& row)>;

  std::vector<double> expected(const Tensor& x, const Row& row) const {
    std::vector<double> all = values(x);
    const uint64_t rows_per_token = all.size() / kT / kD;
    for (uint64_t r = 0; r < all.size() / kD; ++r) {
      std::vector<double> one(&all[r * kD], &all[r * kD] + kD);
      row(r / rows_per_token, one);
      std::copy(one.begin(), one.end(), &all[r * kD]);
    }
    return all;
  }
  static void expect_near(const Tensor& got, const std::vector<double>& truth) {
    const std::vector<double> out = values(got);
    ASSERT_EQ(out.size(), truth.size());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], truth[i], tolerance(got.dtype())) << "row " << i / kD << " e " << i % kD;
    }
  }
  void check(const Tensor& x, const RopeInputs& call, const RopeOptions& options,
             const Row& row) const {
    RopeInputs in = call;
    in.x = x;
    in.out = like(x);
    run(in, options);
    expect_near(in.out, expected(x, row));
  }
  void check_rows(DType dtype, const RopeInputs& call, const RopeOptions& options,
                  const Row& row) const {
    check(random(dtype, {kT, kH, kD}), call, options, row);
  }

  // pos(axis, t) = positions[axis * T + t]
  const std::vector<int32_t> pos_ = [] {
    std::vector<int32_t> all;
    for (int32_t i = 0; i < static_cast<int32_t>(4 * kT); ++i) all.push_back(i * 37 % 101);
    return all;
  }();
  Tensor axes(uint64_t count) const {
    const Tensor tensor = device_.tensor(DType::i32, {count, kT});
    tensor.write_from(std::span<const int32_t>(pos_).first(count * kT));
    return tensor;
  }
  Tensor tokens() const { return axes(1).reshape({kT}); }
};

class RopeMultiParity : public RopeParity, public testing::WithParamInterface<DType> {};

constexpr uint32_t kS[4] = {3, 2, 4, 0};  // wraps: 9 of 10 pairs
const RopeOptions kMulti{.mode = RopeMode::sectioned,
                         .rotary_dim = kR,
                         .partner = RopeSpan::head_dim,
                         .sections = {kS[0], kS[1], kS[2], kS[3]}};

TEST_P(RopeMultiParity, Mrope) {
  check_rows(GetParam(), {.positions = axes(4)}, kMulti, [&](uint64_t t, std::vector<double>& x) {
    for (uint64_t p = 0; p < kR / 2; ++p) {
      const uint64_t sector = p % 9;
      const uint64_t axis = sector < 3 ? 0 : (sector < 5 ? 1 : (sector < 9 ? 2 : 3));
      turn(x, p, p + kD / 2, angle_of(pos_[axis * kT + t], static_cast<double>(p), kR));
    }
  });
}

TEST_P(RopeMultiParity, Imrope) {
  RopeOptions options = kMulti;
  options.mode = RopeMode::interleaved;
  check_rows(GetParam(), {.positions = axes(4)}, options, [&](uint64_t t, std::vector<double>& x) {
    for (uint64_t p = 0; p < kR / 2; ++p) {
      const uint64_t sector = p % 9;
      uint64_t axis = 3;
      if (sector % 3 == 0 && sector < 3 * kS[0]) axis = 0;
      if (sector % 3 == 1 && sector < 3 * kS[1]) axis = 1;
      if (sector % 3 == 2 && sector < 3 * kS[2]) axis = 2;
      turn(x, p, p + kD / 2, angle_of(pos_[axis * kT + t], static_cast<double>(p), kR));
    }
  });
}

TEST_P(RopeMultiParity, Vision) {
  const RopeOptions options{.mode = RopeMode::vision, .sections = {6, 10, 0, 0}};
  check_rows(GetParam(), {.positions = axes(4)}, options, [&](uint64_t t, std::vector<double>& x) {
    for (uint64_t p = 0; p < kD / 2; ++p) {
      const uint64_t axis = p < 6 ? 0 : 1;
      const auto q = static_cast<double>(p - (axis == 1 ? 6 : 0));
      turn(x, p, p + kD / 2, angle_of(pos_[axis * kT + t], q, kD / 2.0));
    }
  });
}

// "Cached form: results bit-identical to the uncached form"; three runs the same.
TEST_P(RopeMultiParity, RepeatedCallsAreBitIdentical) {
  const Tensor x = random(GetParam(), {kT, kH, kD});
  const Bytes first = read_bytes(rotated(x, axes(4), kMulti));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(read_bytes(rotated(x, axes(4), kMulti)), first);
}

INSTANTIATE_TEST_SUITE_P(Reference, RopeMultiParity, testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name(test.param)); });

class RopeRowsParity : public RopeParity, public testing::WithParamInterface<DType> {};

// rope: [T, D], pairs (2i, 2i + 1), one position per row.
TEST_P(RopeRowsParity, Rope) {
  const Tensor x = random(GetParam(), {kT, 1, kD});
  check(x, {.positions = tokens()}, {.pairing = RopePairing::adjacent},
        [&](uint64_t t, std::vector<double>& row) {
          for (uint64_t i = 0; i < kD / 2; ++i) {
            turn(row, 2 * i, 2 * i + 1, angle_of(pos_[t], static_cast<double>(i), kD));
          }
        });
}

INSTANTIATE_TEST_SUITE_P(Reference, RopeRowsParity, testing::ValuesIn(kRopeTypes),
                         [](const auto& test) { return std::string(name(test.param)); });

// rope_neox: pairs (i, i + D/2), i < R/2, denominator D.
const RopeOptions kNeox{
    .rotary_dim = kR, .partner = RopeSpan::head_dim, .exponent = RopeSpan::head_dim};

TEST_F(RopeParity, RopeNeoxBf16) {
  check_rows(DType::bf16, {.positions = tokens()}, kNeox, [&](uint64_t t, std::vector<double>& x) {
    for (uint64_t i = 0; i < kR / 2; ++i) {
      turn(x, i, i + kD / 2, angle_of(pos_[t], static_cast<double>(i), kD));
    }
  });
}

TEST_F(RopeParity, RopeNeoxF32WithAndWithoutFactors) {
  std::vector<float> factors(kR / 2, 1.0f);
  for (const bool given : {false, true}) {
    RopeInputs call{.positions = tokens()};
    if (given) {
      for (size_t i = 0; i < factors.size(); ++i) {
        factors[i] = i % 3 == 2 ? 1e30f : 0.5f + static_cast<float>(i);
      }
      call.factors = filled(DType::f32, {kR / 2}, factors);
    }
    check_rows(DType::f32, call, kNeox, [&](uint64_t t, std::vector<double>& x) {
      for (uint64_t i = 0; i < kR / 2; ++i) {
        turn(x, i, i + kD / 2, angle_of(pos_[t], static_cast<double>(i), kD) / factors[i]);
      }
    });
  }
}

// R = 0 wrote nothing there; here it is refused, and no R stands for all of head_dim.
TEST_F(RopeParity, RopeNeoxOfAllCoordinates) {
  RopeOptions options = kNeox;
  options.rotary_dim.reset();
  check_rows(DType::f32, {.positions = tokens()}, options, [&](uint64_t t, std::vector<double>& x) {
    for (uint64_t i = 0; i < kD / 2; ++i) {
      turn(x, i, i + kD / 2, angle_of(pos_[t], static_cast<double>(i), kD));
    }
  });
}

class Vision2dParity : public RopeParity, public testing::WithParamInterface<DType> {};

TEST_P(Vision2dParity, Vision2dRope) {
  check_rows(GetParam(), {.positions = axes(2)}, {.mode = RopeMode::vision_2d},
             [&](uint64_t t, std::vector<double>& x) {
               for (uint64_t i = 0; i < kD / 4; ++i) {
                 const auto index = static_cast<double>(i);
                 turn(x, i, i + kD / 4, angle_of(pos_[t], index, kD / 2.0));
                 turn(x, kD / 2 + i, kD / 2 + i + kD / 4, angle_of(pos_[kT + t], index, kD / 2.0));
               }
             });
}

INSTANTIATE_TEST_SUITE_P(Reference, Vision2dParity, testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name(test.param)); });

// fused_head_norm_rope.
class HeadNormRopeParity : public RopeParity {
 protected:
  static void norm(std::vector<double>& x, const std::vector<double>& weight) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale = 1 / std::sqrt(sum / kD + kEps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * weight[i];
  }
  const Tensor weight_ = random(DType::f32, {kD}, 9);
  const std::vector<float> factors_ = std::vector<float>(kR / 2, 1.5f);

  NormRopeInputs inputs(const Tensor& x) const {
    return {.x = x,
            .positions = tokens(),
            .out = like(x),
            .weight = weight_,
            .factors = filled(DType::f32, {kR / 2}, factors_)};
  }
  // Pairs (i, i + D/2), i < half_rope, angle pos / theta^(2i/D) / freq_factor.
  std::vector<double> expected_batch(const Tensor& x, const std::vector<double>& weight) const {
    return expected(x, [&](uint64_t t, std::vector<double>& row) {
      norm(row, weight);
      for (uint64_t i = 0; i < kR / 2; ++i) {
        turn(row, i, i + kD / 2, angle_of(pos_[t], static_cast<double>(i), kD) / factors_[i]);
      }
    });
  }
};

TEST_F(HeadNormRopeParity, F32BatchWithAndWithoutWeight) {
  const Tensor x = random(DType::f32, {kT, kH, kD});
  NormRopeInputs in = inputs(x);
  run(in, {.rope = kNeox, .epsilon = kEps});
  expect_near(in.out, expected_batch(x, values(weight_)));
  in.weight = {};
  run(in, {.rope = kNeox, .epsilon = kEps});
  expect_near(in.out, expected_batch(x, std::vector<double>(kD, 1.0)));
}

// The optional copies: bf16 in the natural and in the [H, T, D] order, f32 in the latter.
TEST_F(HeadNormRopeParity, F32BatchWithItsSecondOutputs) {
  const Tensor x = random(DType::f32, {kT, kH, kD});
  const std::vector<double> truth = expected_batch(x, values(weight_));
  const Tensor natural = device_.tensor(DType::bf16, {kT, kH, kD});
  const Tensor permuted = device_.tensor(DType::bf16, {kH, kT, kD}).permute({1, 0, 2});
  const Tensor permuted_f32 = device_.tensor(DType::f32, {kH, kT, kD}).permute({1, 0, 2});
  for (const Tensor& second : {natural, permuted, permuted_f32}) {
    NormRopeInputs in = inputs(x);
    in.second = second;
    run(in, {.rope = kNeox, .epsilon = kEps});
    expect_near(in.out, truth);
    expect_near(second, truth);
  }
}

TEST_F(HeadNormRopeParity, F32OneToken) {
  const Tensor x = random(DType::f32, {kT, kH, kD});
  const Tensor out = like(x);
  for (uint64_t t = 0; t < kT; ++t) {
    NormRopeInputs in = inputs(x);
    in.x = x.slice(0, t, 1);
    in.out = out.slice(0, t, 1);
    in.positions = tokens().slice(0, t, 1);
    run(in, {.rope = kNeox, .epsilon = kEps});
  }
  expect_near(out, expected_batch(x, values(weight_)));
}

TEST_F(HeadNormRopeParity, Bf16Batch) {
  const Tensor x = random(DType::bf16, {kT, kH, kD});
  const NormRopeInputs in = inputs(x);
  run(in, {.rope = kNeox, .epsilon = kEps});
  expect_near(in.out, expected_batch(x, values(weight_)));
}

// The one-token form takes tables of cosines and sines: the angles are frequencies at position 1.
// Its partner is half_rope away, and what is behind 2 * half_rope is only normalised.
TEST_F(HeadNormRopeParity, Bf16OneTokenWithItsOwnAngles) {
  const Tensor x = random(DType::bf16, {1, kT * kH, kD});
  std::vector<float> angles(kR / 2);
  for (size_t i = 0; i < angles.size(); ++i) angles[i] = 0.3f * static_cast<float>(i) - 1;
  NormRopeInputs in{.x = x,
                    .positions = positions({1}),
                    .out = like(x),
                    .weight = weight_,
                    .frequencies = filled(DType::f32, {kR / 2}, angles)};
  run(in, {.rope = RopeOptions{.rotary_dim = kR}, .epsilon = kEps});
  expect_near(in.out, expected(x, [&](uint64_t, std::vector<double>& row) {
                norm(row, values(weight_));
                for (uint64_t i = 0; i < kR / 2; ++i) turn(row, i, i + kR / 2, angles[i]);
              }));
}

// half_rope = 0.
TEST_F(HeadNormRopeParity, NormOnly) {
  const Tensor x = random(DType::f32, {kT, kH, kD});
  NormRopeInputs in{.x = x, .out = like(x), .weight = weight_};
  run(in, {.rope = std::nullopt, .epsilon = kEps});
  expect_near(in.out,
              expected(x, [&](uint64_t, std::vector<double>& row) { norm(row, values(weight_)); }));
}

}  // namespace
}  // namespace gyre::test
