// What rotations must do whatever the numbers are.
#include <numeric>

#include "gyre_test.h"
#include "rope/rope_fixture.h"

namespace gyre::test {
namespace {

// 5 + 3 heads of 96: rows in and beside groups of four, 48 pairs.
constexpr uint64_t kTokens = 7;
const std::vector<int32_t> kAt = {0, 1, -5, 4095, 100000, -(1 << 20), (1 << 20) - 1};

class RopeProperty : public RopeTest {
 protected:
  const Tensor x_ = random(DType::f32, {kTokens, 5, 96}, 1);
  const Tensor k_ = random(DType::f32, {kTokens, 3, 96}, 2), at_ = positions(kAt);

  static std::vector<RopeOptions> plain_conventions() {
    RopeOptions partial{.rotary_dim = 50};
    RopeOptions partner{.rotary_dim = 50, .partner = RopeSpan::head_dim};
    return {{}, {.pairing = RopePairing::adjacent}, partial, partner};
  }
};

double squared_norm(std::span<const double> values) {
  return std::inner_product(values.begin(), values.end(), values.begin(), 0.0);
}

TEST_F(RopeProperty, NormIsPreserved) {
  for (const RopeOptions& options : plain_conventions()) {
    const std::vector<double> before = values(x_), after = values(rotated(x_, at_, options));
    for (size_t row = 0; row < before.size(); row += 96) {
      const std::span<const double> from(&before[row], 96);
      const std::span<const double> to(&after[row], 96);
      EXPECT_NEAR(squared_norm(to) / squared_norm(from), 1, 3e-7) << "row " << row / 96;
    }
  }
}

// Bit for bit: the axis is all that the sectioned modes add.
TEST_F(RopeProperty, EqualAxesMakeSectionedModesPlain) {
  constexpr uint32_t kSections[][4] = {{16, 16, 16, 0}, {3, 2, 1, 0}, {0, 0, 0, 0}, {90, 9, 7, 1}};
  const Tensor four = positions_on_axes(kAt, 4);
  for (const RopeOptions& options : plain_conventions()) {
    const Bytes expected = read_bytes(rotated(x_, at_, options));
    for (const RopeMode mode : {RopeMode::sectioned, RopeMode::interleaved}) {
      for (const auto& sections : kSections) {
        RopeOptions sectioned = options;
        sectioned.mode = mode;
        std::copy(std::begin(sections), std::end(sections), std::begin(sectioned.sections));
        EXPECT_EQ(read_bytes(rotated(x_, four, sectioned)), expected);
      }
    }
  }
}

// And the two vision modes are plain rotations of parts of the head.
TEST_F(RopeProperty, VisionIsPlainRotationOfParts) {
  const Tensor out = rotated(x_, positions_on_axes(kAt, 2), {.mode = RopeMode::vision_2d});
  for (const uint64_t half : {0u, 48u}) {
    const Tensor part = device_.tensor(DType::f32, {kTokens, 5, 48});
    run(RopeInputs{.x = x_.slice(2, half, 48), .positions = at_, .out = part});
    EXPECT_EQ(read_bytes(out.slice(2, half, 48)), read_bytes(part));
  }
  const Tensor vision = rotated(x_, positions_on_axes(kAt, 4),
                                {.mode = RopeMode::vision, .sections = {24, 24, 0, 0}});
  for (const uint64_t run_of_pairs : {0u, 24u}) {
    const Tensor pairs = device_.tensor(DType::f32, {kTokens, 5, 48});
    for (const uint64_t half : {0u, 1u})
      copy_floats(x_.slice(2, run_of_pairs + 48 * half, 24), pairs.slice(2, 24 * half, 24));
    run(RopeInputs{.x = pairs, .positions = at_, .out = pairs});
    EXPECT_EQ(read_bytes(vision.slice(2, run_of_pairs, 24)), read_bytes(pairs.slice(2, 0, 24)));
    EXPECT_EQ(read_bytes(vision.slice(2, run_of_pairs + 48, 24)),
              read_bytes(pairs.slice(2, 24, 24)));
  }
}

TEST_F(RopeProperty, TurningByAThenBIsTurningByTheSum) {
  std::vector<int32_t> b = {77, -3, 500000, 1, -100000, 1 << 20, -12345}, sum(kTokens);
  for (size_t i = 0; i < kTokens; ++i) sum[i] = kAt[i] + b[i];
  for (const RopeOptions& options : plain_conventions()) {
    const Tensor twice = rotated(rotated(x_, at_, options), positions(b), options);
    EXPECT_LE(largest_difference(twice, rotated(x_, positions(sum), options)), 1e-6);
  }
}

TEST_F(RopeProperty, ANegativePositionUndoesAPositiveOne) {
  std::vector<int32_t> back(kTokens);
  std::transform(kAt.begin(), kAt.end(), back.begin(), [](int32_t p) { return -p; });
  for (const RopeOptions& options : plain_conventions()) {
    const Tensor there = rotated(x_, at_, options);
    EXPECT_GT(largest_difference(there, x_), 0.1);
    EXPECT_LE(largest_difference(rotated(there, positions(back), options), x_), 1e-6);
  }
}

TEST_F(RopeProperty, PositionZeroChangesNothing) {
  for (const DType dtype : kRopeTypes) {
    const Tensor x = random(dtype, {3, 5, 96});
    EXPECT_EQ(read_bytes(rotated(x, positions({0, 0, 0}))), read_bytes(x));
  }
}

TEST_F(RopeProperty, AMagnitudeScalesWhatTurnsAndNothingElse) {
  RopeOptions options{.rotary_dim = 50};
  const std::vector<double> one = values(rotated(x_, at_, options));
  options.magnitude = 4;
  const std::vector<double> four = values(rotated(x_, at_, options));
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(four[i], i % 96 < 50 ? 4 * one[i] : one[i]) << i;  // a power of two is exact
  }
}

// Coordinates that do not turn are not computed with: payloads of NaN and signs of zero survive.
TEST_F(RopeProperty, WhatDoesNotTurnKeepsEveryBit) {
  for (const DType dtype : kRopeTypes) {
    for (const RopeOptions& options : plain_conventions()) {
      if (!options.rotary_dim) continue;
      const bool far = options.partner == RopeSpan::head_dim;
      const Tensor x = device_.tensor(dtype, {3, 5, 96});
      std::mt19937 random(7);
      Bytes bits(x.bytes());
      for (std::byte& byte : bits) byte = static_cast<std::byte>(random());
      write_bytes(x, bits);
      const Tensor out = rotated(x, positions({5, -7, 1 << 20}), options);
      const std::vector<std::pair<uint64_t, uint64_t>> still =
          far ? std::vector<std::pair<uint64_t, uint64_t>>{{25, 23}, {73, 23}}
              : std::vector<std::pair<uint64_t, uint64_t>>{{50, 46}};
      for (const auto& [begin, count] : still) {
        EXPECT_EQ(read_bytes(out.slice(2, begin, count)), read_bytes(x.slice(2, begin, count)));
      }
    }
  }
}

// The squares of these leave f32; a norm of 1e20 is a norm like any other.
TEST_F(RopeProperty, HeadsOfAnySizeAreNormalisedAlike) {
  const std::vector<float> unit = floats_of(x_);
  const Tensor expected = like(x_);
  run(NormRopeInputs{.x = x_, .positions = at_, .out = expected}, {.epsilon = 0});
  for (const float size : {1e20f, 3e38f, 0x1p63f, 1e-20f, 1e-30f, 1e-37f}) {
    std::vector<float> scaled(unit);
    for (float& value : scaled) value *= size;
    const Tensor x = filled(DType::f32, x_.shape(), scaled), out = like(x);
    run(NormRopeInputs{.x = x, .positions = at_, .out = out}, {.epsilon = 0});
    EXPECT_LE(largest_difference(out, expected), 4e-6) << size;
    run(NormRopeInputs{.x = x, .out = out}, {.rope = std::nullopt, .epsilon = 1e-6f});
    for (const double value : values(out)) ASSERT_TRUE(std::isfinite(value)) << size;
  }
  // NaN and infinity reach the output.
  for (const float bad : {NAN, HUGE_VALF}) {
    std::vector<float> broken(unit);
    broken[96 + 7] = bad;
    const Tensor out = like(x_);
    run(NormRopeInputs{.x = filled(DType::f32, x_.shape(), broken), .positions = at_, .out = out});
    EXPECT_TRUE(std::isnan(values(out)[96 + 7])) << bad;
  }
}

class RopeEqualCalls : public RopeProperty {
 protected:
  NormRopeInputs norm_inputs(const Tensor& x, const Tensor& out, const Tensor& weight) const {
    return {.x = x, .positions = at_, .out = out, .weight = weight};
  }
};

TEST_F(RopeEqualCalls, QAndKTogetherAreTwoCalls) {
  for (const RopeOptions& options : plain_conventions()) {
    for (const DType dtype : kRopeTypes) {
      const Tensor q_out = like(x_, dtype), k_out = like(k_, dtype);
      run(RopeInputs{.x = x_, .positions = at_, .out = q_out, .k = k_, .k_out = k_out}, options);
      const Tensor q_alone = like(x_, dtype), k_alone = like(k_, dtype);
      run(RopeInputs{.x = x_, .positions = at_, .out = q_alone}, options);
      run(RopeInputs{.x = k_, .positions = at_, .out = k_alone}, options);
      EXPECT_EQ(read_bytes(q_out), read_bytes(q_alone));
      EXPECT_EQ(read_bytes(k_out), read_bytes(k_alone));
    }
  }
}

TEST_F(RopeEqualCalls, NormedQAndKTogetherAreTwoCalls) {
  const Tensor q_weight = random(DType::bf16, {96}, 5), k_weight = random(DType::bf16, {96}, 6);
  for (const RopeOptions& options : plain_conventions()) {
    const Tensor q_out = like(x_), k_out = like(k_);
    NormRopeInputs both = norm_inputs(x_, q_out, q_weight);
    both.k = k_;
    both.k_out = k_out;
    both.k_weight = k_weight;
    run(both, {.rope = options});
    const Tensor q_alone = like(x_), k_alone = like(k_);
    run(norm_inputs(x_, q_alone, q_weight), {.rope = options});
    run(norm_inputs(k_, k_alone, k_weight), {.rope = options});
    EXPECT_EQ(read_bytes(q_out), read_bytes(q_alone));
    EXPECT_EQ(read_bytes(k_out), read_bytes(k_alone));
  }
}

// Weights and second outputs belong to one of the two: the other may have none, or another dtype.
TEST_F(RopeEqualCalls, EachOfQAndKHasItsOwnWeightAndSecondOutput) {
  const Tensor weights[] = {{}, random(DType::bf16, {96}, 5), random(DType::f32, {96}, 6)};
  const auto second_of = [&](const Tensor& x, size_t kind) {
    return kind == 0 ? Tensor() : like(x, kind == 1 ? DType::f16 : DType::f32);
  };
  for (size_t i = 0; i < 9; ++i) {
    NormRopeInputs q = norm_inputs(x_, like(x_), weights[i / 3]);
    NormRopeInputs k = norm_inputs(k_, like(k_), weights[i % 3]);
    q.second = second_of(x_, i % 3);
    k.second = second_of(k_, i / 3);
    NormRopeInputs both = norm_inputs(x_, like(x_), q.weight);
    both.second = second_of(x_, i % 3);
    both.k = k_;
    both.k_out = like(k_);
    both.k_weight = k.weight;
    both.k_second = second_of(k_, i / 3);
    for (const NormRopeInputs& call : {q, k, both}) run(call, {.weight_offset = 1});
    EXPECT_EQ(read_bytes(both.out), read_bytes(q.out)) << i;
    EXPECT_EQ(read_bytes(both.k_out), read_bytes(k.out)) << i;
    if (q.second.defined()) {
      EXPECT_EQ(read_bytes(both.second), read_bytes(q.second)) << i;
    }
    if (k.second.defined()) {
      EXPECT_EQ(read_bytes(both.k_second), read_bytes(k.second)) << i;
    }
  }
}

TEST_F(RopeEqualCalls, NormRopeIsTheNormAndThenRope) {
  const Tensor weight = random(DType::f32, {96}, 5);
  for (const RopeOptions& options : plain_conventions()) {
    const Tensor together = like(x_);
    run(norm_inputs(x_, together, weight), {.rope = options, .weight_offset = 1});
    const Tensor normed = like(x_);
    NormRopeInputs alone{.x = x_, .out = normed, .weight = weight};
    run(alone, {.rope = std::nullopt, .weight_offset = 1});
    EXPECT_LE(largest_difference(together, rotated(normed, at_, options)), 1e-6);
  }
}

TEST_F(RopeEqualCalls, ASecondOutputIsTheFirstRoundedOnce) {
  const Tensor weight = random(DType::f32, {96}, 5);
  for (const DType dtype : kRopeTypes) {
    const Tensor out = like(x_), heads = device_.tensor(dtype, {5, kTokens, 96});
    NormRopeInputs in = norm_inputs(x_, out, weight);
    in.second = heads.permute({1, 0, 2});
    run(in);
    const Bytes exact = read_bytes(out);
    Bytes rounded(x_.elements() * size_bytes(dtype));
    for (uint64_t i = 0; i < x_.elements(); ++i) {
      const uint32_t bits = reference::load_bits(DType::f32, exact.data(), i);
      reference::store_bits(dtype, rounded.data(), i, reference::convert(DType::f32, dtype, bits));
    }
    EXPECT_EQ(read_bytes(in.second), rounded);
  }
}

TEST_F(RopeEqualCalls, InPlaceIsTheSameAsOutOfPlace) {
  for (const DType dtype : kRopeTypes) {
    for (const RopeOptions& options : plain_conventions()) {
      const Tensor x = random(dtype, {kTokens, 5, 96});
      const Bytes expected = read_bytes(rotated(x, at_, options));
      run(RopeInputs{.x = x, .positions = at_, .out = x}, options);
      EXPECT_EQ(read_bytes(x), expected);
    }
  }
}

// One token, one head at a time: neither knows of the others.
TEST_F(RopeEqualCalls, TokensAndHeadsAreIndependent) {
  const Bytes expected = read_bytes(rotated(x_, at_));
  const Tensor out = like(x_);
  for (uint64_t t = 0; t < kTokens; ++t) {
    for (uint64_t h = 0; h < 5; ++h) {
      run(RopeInputs{.x = x_.slice(0, t, 1).slice(1, h, 1),
                     .positions = at_.slice(0, t, 1),
                     .out = out.slice(0, t, 1).slice(1, h, 1)});
    }
  }
  EXPECT_EQ(read_bytes(out), expected);
}

TEST_F(RopeEqualCalls, StridesChangeNothing) {
  const Tensor heads = device_.tensor(DType::f32, {5, kTokens, 96});
  copy_floats(x_, heads.permute({1, 0, 2}));
  const Tensor out = device_.tensor(DType::f32, {5, kTokens, 96});
  run(RopeInputs{.x = heads.permute({1, 0, 2}), .positions = at_, .out = out.permute({1, 0, 2})});
  EXPECT_EQ(read_bytes(out.permute({1, 0, 2})), read_bytes(rotated(x_, at_)));
}

// A row that is read several times (stride 0) is still one row.
TEST_F(RopeEqualCalls, AnInputMayRepeatItself) {
  const Tensor row = random(DType::f32, {1, 1, 96});
  const Tensor repeated = row.strided({kTokens, 5, 96}, {0, 0, 1});
  const Tensor out = device_.tensor(DType::f32, {kTokens, 5, 96});
  run(RopeInputs{.x = repeated, .positions = at_, .out = out});
  const Tensor once = rotated(row, positions({kAt[3]}));
  for (uint64_t h = 0; h < 5; ++h) {
    EXPECT_EQ(read_bytes(out.slice(0, 3, 1).slice(1, h, 1)), read_bytes(once));
  }
}

TEST_F(RopeEqualCalls, ThreadsChangeNothing) {
  const Tensor x = random(DType::f32, {129, 6, 128}), weight = random(DType::f32, {128});
  std::vector<int32_t> at(129);
  std::iota(at.begin(), at.end(), 100000);
  std::vector<Bytes> results;
  for (const uint32_t threads : {1u, 2u, 3u, 7u}) {
    device_ = Device::open("cpu", {.threads = threads});
    const Tensor own = device_.tensor(DType::f32, x.shape());
    write_bytes(own, read_bytes(x));
    const Tensor own_weight = device_.tensor(DType::f32, {128});
    write_bytes(own_weight, read_bytes(weight));
    Bytes both = read_bytes(rotated(own, positions(at)));
    const Tensor out = like(own, DType::bf16);
    run(NormRopeInputs{.x = own, .positions = positions(at), .out = out, .weight = own_weight});
    const Bytes normed = read_bytes(out);
    both.insert(both.end(), normed.begin(), normed.end());
    results.push_back(both);
  }
  for (const Bytes& result : results) EXPECT_EQ(result, results[0]);
}

}  // namespace
}  // namespace gyre::test
