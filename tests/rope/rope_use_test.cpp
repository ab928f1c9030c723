// Ways of calling rope and norm_rope that a model's code takes: packed projections, frequencies of
// every origin, many calls in one list, and what the device says about it all.
#include "expect_error.h"
#include "gyre_test.h"
#include "rope/rope_fixture.h"
#include "rope/rope_reference.h"

namespace gyre::test {
namespace {

class RopeUse : public RopeTest {
 protected:
  // Largest error of an f32 call on one head against `radians`.
  double error(const Tensor& got, const Tensor& x, std::span<const long double> radians,
               std::span<const int32_t> at, const RopeOptions& options) const {
    const std::vector<double> in = values(x), out = values(got);
    const uint64_t head_dim = x.shape(2);
    double worst = 0;
    for (size_t t = 0; t < at.size(); ++t) {
      const int64_t position = at[t];
      const auto turns = reference::rope_turns(options, head_dim, radians, {&position, 1});
      const auto row = std::span(in).subspan(t * head_dim, head_dim);
      const reference::RopeHead head = reference::rope_head(row, turns);
      for (size_t e = 0; e < head_dim; ++e)
        worst = std::max(worst, std::abs(out[t * head_dim + e] - head.value[e]));
    }
    return worst;
  }
  double error_of_call(const RopeInputs& call, std::span<const long double> radians,
                       const std::vector<int32_t>& at, const RopeOptions& options = {}) const {
    RopeInputs in = call;
    in.x = random(DType::f32, {at.size(), 1, 2 * radians.size()});
    in.out = like(in.x);
    in.positions = positions(at);
    run(in, options);
    return error(in.out, in.x, radians, at, options);
  }
};

// The usual projection writes Q, K and V side by side; rope turns Q and K where they lie.
TEST_F(RopeUse, PackedProjectionsTurnInPlace) {
  constexpr uint64_t kTokens = 3;
  constexpr uint64_t kDim = 16;
  const auto check = [&](uint64_t q_heads, uint64_t kv_heads) {
    const uint64_t rows = q_heads + 2 * kv_heads;
    const Tensor qkv = random(DType::f32, {kTokens, rows, kDim}), at = positions({7, -8, 100000});
    const Tensor q = qkv.slice(1, 0, q_heads), k = qkv.slice(1, q_heads, kv_heads);
    const Bytes v = read_bytes(qkv.slice(1, q_heads + kv_heads, kv_heads));
    const Tensor expected_q = device_.tensor(DType::f32, {kTokens, q_heads, kDim});
    const Tensor expected_k = device_.tensor(DType::f32, {kTokens, kv_heads, kDim});
    run(RopeInputs{.x = q, .positions = at, .out = expected_q});
    run(RopeInputs{.x = k, .positions = at, .out = expected_k});
    run(RopeInputs{.x = q, .positions = at, .out = q, .k = k, .k_out = k});
    EXPECT_EQ(read_bytes(q), read_bytes(expected_q));
    EXPECT_EQ(read_bytes(k), read_bytes(expected_k));
    EXPECT_EQ(read_bytes(qkv.slice(1, q_heads + kv_heads, kv_heads)), v);
  };
  check(4, 4);
  check(8, 2);
}

TEST_F(RopeUse, OutputsMaySitInOneBuffer) {
  const Tensor q = random(DType::f32, {3, 8, 16}, 1), k = random(DType::f32, {3, 2, 16}, 2);
  const Tensor at = positions({7, -8, 100000}), packed = device_.tensor(DType::bf16, {3, 10, 16});
  run(RopeInputs{.x = q,
                 .positions = at,
                 .out = packed.slice(1, 0, 8),
                 .k = k,
                 .k_out = packed.slice(1, 8, 2)});
  const Tensor alone = like(k, DType::bf16);
  run(RopeInputs{.x = k, .positions = at, .out = alone});
  EXPECT_EQ(read_bytes(packed.slice(1, 8, 2)), read_bytes(alone));
}

// Where a dimension has one entry its stride means nothing.
TEST_F(RopeUse, InPlaceIsAboutPlacesNotStrides) {
  const Tensor x = random(DType::f32, {1, 3, 16});
  const Bytes expected = read_bytes(rotated(x, positions({5})));
  const Tensor same = x.strided({1, 3, 16}, {0, 16, 1});
  run(RopeInputs{.x = x, .positions = positions({5}), .out = same});
  EXPECT_EQ(read_bytes(x), expected);
}

TEST_F(RopeUse, ScaledFrequenciesGoFromConfigToKernel) {
  const std::vector<int32_t> at = {0, 8191, 131071, -5};
  for (const RopeType type : {RopeType::standard, RopeType::linear, RopeType::ntk,
                              RopeType::dynamic, RopeType::yarn, RopeType::llama3}) {
    const RopeConfig config{.rope_theta = 500000,
                            .rotary_dim = 128,
                            .rope_type = type,
                            .factor = 8,
                            .original_max_position_embeddings = 8192,
                            .seq_len = 20000};
    const RopeFrequencies f = rope_frequencies(config);
    const std::vector<long double> radians(f.inverse.begin(), f.inverse.end());
    const RopeOptions options{.magnitude = static_cast<float>(f.attention_factor)};
    const RopeInputs call{.frequencies = rope_table(device_, f.inverse)};
    EXPECT_LE(error_of_call(call, radians, at, options), 1e-6) << static_cast<int>(type);
  }
}

TEST_F(RopeUse, ABaseAndItsOwnTableAgree) {
  const std::vector<double> own = rope_frequencies({.rope_theta = 1e6, .rotary_dim = 64}).inverse;
  const Tensor x = random(DType::f32, {2, 3, 64}), at = positions({100000, -3}), out = like(x);
  run(RopeInputs{.x = x, .positions = at, .out = out, .frequencies = rope_table(device_, own)});
  EXPECT_LE(largest_difference(out, rotated(x, at, {.base = 1e6})), 2e-7);
}

// A table in a part of a larger tensor is aligned to its elements, not to its entries.
TEST_F(RopeUse, ATableMayLieAnywhere) {
  const std::vector<double> radians = {1.0, 0.1, 0.01, 0.001};
  const Tensor made = rope_table(device_, radians), room = device_.tensor(DType::u32, {9});
  const Tensor moved = room.slice(0, 1, 8).reshape({4, 2});
  write_bytes(moved, read_bytes(made));
  const std::vector<long double> truth(radians.begin(), radians.end());
  EXPECT_LE(error_of_call({.frequencies = moved}, truth, {3, -4000}), 1e-6);
  const Tensor ones = filled(DType::f32, {4}, std::vector<float>(4, 1.0f));
  EXPECT_LE(error_of_call({.frequencies = moved, .factors = ones}, truth, {3, -4000}), 1e-6);
}

// "Each frequency is divided by its factor": what a table leaves out, signs and whole turns, must
// not be missed then.
TEST_F(RopeUse, FactorsDivideBackwardFrequencies) {
  const std::vector<double> backward = {-1, -0.5, -0.25, -0.125};
  const std::vector<long double> divided = {-0.5L, -0.25L, -0.125L, -0.0625L};
  const Tensor twos = filled(DType::f32, {4}, std::vector<float>(4, 2.0f));
  const RopeInputs call{.frequencies = rope_table(device_, backward), .factors = twos};
  EXPECT_LE(error_of_call(call, divided, {1, 3, -77}), 1e-6);
}

// With a base that makes more than a turn per position, factors divide rightly or are refused.
TEST_F(RopeUse, FactorsDivideFastFrequenciesOrAreRefused) {
  const RopeOptions options{.base = 0.01};  // up to 31 radians per position
  std::vector<long double> divided = reference::rope_frequencies(options, 8);
  for (long double& radians : divided) radians /= 3;
  const Tensor threes = filled(DType::f32, {4}, std::vector<float>(4, 3.0f));
  try {
    EXPECT_LE(error_of_call({.factors = threes}, divided, {1, 3, -77}, options), 1e-6);
  } catch (const Error& refusal) {
    EXPECT_EQ(refusal.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(refusal.what()).find("0.01"), std::string::npos) << refusal.what();
  }
}

TEST_F(RopeUse, TheNormAloneHasTheSameLimitOfHeadDim) {
  const Tensor x = device_.tensor(DType::f32, {1, 1, 4096});
  Encoder encoder(device_);
  EXPECT_REFUSED(("norm_rope: ", "head_dim", "2048", "got 4096"),
                 norm_rope(encoder, {.x = x, .out = like(x)}, {.rope = std::nullopt}));
}

TEST_F(RopeUse, AnUnknownPairingIsRefused) {
  const Tensor x = random(DType::f32, {1, 1, 8});
  Encoder encoder(device_);
  EXPECT_REFUSED(("rope: ", "9"), rope(encoder, {.x = x, .positions = positions({1}), .out = x},
                                       {.pairing = static_cast<RopePairing>(9)}));
}

// Every operand, so that no write to one of them is overtaken.
TEST_F(RopeUse, EveryOperandIsTracked) {
  std::vector<float> memory(16 * 16, 1.0f);
  const auto slot = [&](size_t i, DType dtype, const Dims& shape) {
    return device_.wrap(static_cast<void*>(&memory[i * 16]), dtype, shape);
  };
  const Dims head{1, 1, 8};
  const NormRopeInputs in{.x = slot(0, DType::f32, head),
                          .positions = slot(1, DType::i32, {1}),
                          .out = slot(2, DType::f32, head),
                          .weight = slot(3, DType::f32, {8}),
                          .second = slot(4, DType::f32, head),
                          .k = slot(5, DType::f32, head),
                          .k_out = slot(6, DType::f32, head),
                          .k_weight = slot(7, DType::f32, {8}),
                          .k_second = slot(8, DType::f32, head),
                          .frequencies = slot(9, DType::f32, {4}),
                          .factors = slot(10, DType::f32, {4})};
  const Tensor source = random(DType::f32, head);
  for (size_t i = 0; i <= 11; ++i) {
    Encoder encoder(device_);
    kv_copy(encoder, {.k = source, .k_cache = slot(i, DType::f32, head)});
    norm_rope(encoder, in);
    EXPECT_EQ(encoder.barriers(), i < 11 ? 1u : 0u) << "operand " << i;
  }
}

// An angle that cannot be computed is visible in its pair, and in no other; nothing passes for "no
// rotation" by accident.
TEST_F(RopeUse, FrequenciesThatAreNotFiniteMakeTheirPairNaN) {
  const Tensor x = random(DType::f32, {2, 5, 12}), weight = random(DType::f32, {12}, 4);
  const Tensor at = positions({0, 3});
  struct Bad {
    std::vector<float> frequencies, factors;
    std::vector<bool> nan;
  };
  const Bad all[] = {
      {{NAN, 1, HUGE_VALF, -HUGE_VALF, 0.5f, 0}, {}, {true, false, true, true, false, false}},
      {{}, {0, NAN, 1, -0.0f, 2, 3}, {true, true, false, true, false, false}},
      {{1, 0, 1, 1, 1, HUGE_VALF},
       {0, 0, 1, 1, 1, HUGE_VALF},
       {true, true, false, false, false, true}},
  };
  for (const RopePairing pairing : {RopePairing::split_half, RopePairing::adjacent}) {
    for (const Bad& bad : all) {
      RopeInputs in{.x = x, .positions = at, .out = like(x)};
      if (!bad.frequencies.empty()) in.frequencies = filled(DType::f32, {6}, bad.frequencies);
      if (!bad.factors.empty()) in.factors = filled(DType::f32, {6}, bad.factors);
      const Tensor normed = like(x);
      run(in, {.pairing = pairing});
      run(NormRopeInputs{.x = x,
                         .positions = at,
                         .out = normed,
                         .weight = weight,
                         .frequencies = in.frequencies,
                         .factors = in.factors},
          {.rope = RopeOptions{.pairing = pairing}});
      const std::vector<double> got = values(in.out), got_normed = values(normed);
      for (size_t i = 0; i < got.size(); ++i) {
        const size_t e = i % 12;
        const bool nan = bad.nan[pairing == RopePairing::adjacent ? e / 2 : e % 6];
        ASSERT_EQ(std::isnan(got[i]), nan) << i;
        ASSERT_EQ(std::isnan(got_normed[i]), nan) << i;
      }
    }
  }
}

// Dividing by infinity stops a pair, and a whole number of turns per position is none.
TEST_F(RopeUse, StoppedPairsAndWholeTurnsKeepTheirValues) {
  const Tensor x = random(DType::f32, {2, 5, 12});
  RopeInputs in{.x = x, .positions = positions({1000, -77}), .out = like(x)};
  in.factors = filled(DType::f32, {6}, std::vector<float>(6, HUGE_VALF));
  run(in);
  EXPECT_EQ(read_bytes(in.out), read_bytes(x));
  in.factors = {};
  in.frequencies = filled(DType::f32, {6}, std::vector<float>(6, 3e38f));
  run(in);
  EXPECT_EQ(read_bytes(in.out), read_bytes(x));
}

// What the header promises for frequencies that pass through double precision.
TEST_F(RopeUse, GivenFrequenciesAndFactorsAreWithinTheirBoundAtTheLastPosition) {
  std::vector<float> given;
  std::vector<long double> radians;
  std::vector<long double> divided;
  std::vector<float> factors;
  for (size_t p = 0; p < 32; ++p) {
    given.push_back(1.0f / (1.0f + static_cast<float>(p) * 0.7f));
    radians.emplace_back(given.back());
    factors.push_back(1.0f + static_cast<float>(p) * 0.3f);
    divided.push_back(radians.back() / factors.back());
  }
  const std::vector<int32_t> at = {INT32_MAX, INT32_MIN, INT32_MAX - 12345};
  RopeInputs in{.frequencies = filled(DType::f32, {32}, given)};
  EXPECT_LE(error_of_call(in, radians, at), 2e-6 + 2e-6);
  in.factors = filled(DType::f32, {32}, factors);
  EXPECT_LE(error_of_call(in, divided, at), 2e-6 + 2e-6);
}

TEST_F(RopeUse, CallsInOneListSeeEachOther) {
  const Tensor x = random(DType::f32, {3, 5, 64}), at = positions({1, 2, 3});
  const Bytes once = read_bytes(rotated(x, positions({5, 10, 15})));
  Encoder encoder(device_);
  for (int i = 0; i < 5; ++i) rope(encoder, {.x = x, .positions = at, .out = x});
  EXPECT_EQ(encoder.barriers(), 4u);
  encoder.submit().wait();
  const Tensor expected = like(x);
  write_bytes(expected, once);
  EXPECT_LE(largest_difference(x, expected), 2e-6);
}

TEST_F(RopeUse, TheDeviceKnowsWhatItSupports) {
  constexpr std::array kAll = {DType::f32, DType::f16, DType::bf16, DType::u8,
                               DType::i32, DType::u32, DType::i64};
  for (const DType x : kAll) {
    for (const DType out : kAll) {
      const bool floats = is_float(x) && is_float(out);
      EXPECT_EQ(supports(device_, RopeTypes{x, out}), floats) << name(x) << " to " << name(out);
    }
  }
}

TEST_F(RopeUse, TracesSayWhatRan) {
  const Tensor x = random(DType::f32, {3, 5, 64}), k = random(DType::f32, {3, 2, 64});
  device_.start_trace();
  run(RopeInputs{.x = x, .positions = positions({1, 2, 3}), .out = x, .k = k, .k_out = k},
      {.rotary_dim = 32});
  const Trace trace = device_.stop_trace();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].kernel, "rope");
  EXPECT_EQ(trace.events[0].shape, "tokens=3 heads=7 head_dim=64 pairs=16 mode=0");
}

}  // namespace
}  // namespace gyre::test
