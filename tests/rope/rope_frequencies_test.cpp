// rope_frequencies against the definitions of Hugging Face transformers (modeling_rope_utils),
// written anew here, against numbers computed with 60 digits from the configs of published models,
// and against what each scaling promises in words.
#include "expect_error.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Published models.
RopeConfig qwen2_5_yarn() {
  return {.rope_theta = 1e6,
          .rotary_dim = 128,
          .rope_type = RopeType::yarn,
          .factor = 4,
          .original_max_position_embeddings = 32768};
}
RopeConfig deepseek_v3() {
  return {.rope_theta = 10000,
          .rotary_dim = 64,
          .rope_type = RopeType::yarn,
          .factor = 40,
          .original_max_position_embeddings = 4096,
          .mscale = 1.0,
          .mscale_all_dim = 1.0};
}
RopeConfig gpt_oss() {
  return {.rope_theta = 150000,
          .rotary_dim = 64,
          .rope_type = RopeType::yarn,
          .factor = 32,
          .original_max_position_embeddings = 4096,
          .truncate = false};
}
RopeConfig llama3_1() {
  return {.rope_theta = 500000,
          .rotary_dim = 128,
          .rope_type = RopeType::llama3,
          .factor = 8,
          .original_max_position_embeddings = 8192};
}
RopeConfig llama3_2() {
  RopeConfig config = llama3_1();
  config.rotary_dim = 64;
  config.factor = 32;
  return config;
}

std::vector<double> default_inv_freq(double base, uint32_t dim) {
  std::vector<double> inv_freq;
  for (uint32_t i = 0; i < dim; i += 2)
    inv_freq.push_back(1.0 / std::pow(base, static_cast<double>(i) / dim));
  return inv_freq;
}

std::vector<double> yarn_inv_freq(const RopeConfig& c) {
  const double dim = c.rotary_dim;
  const auto find_correction_dim = [&](double num_rotations) {
    return dim * std::log(c.original_max_position_embeddings / (num_rotations * 2 * kPi)) /
           (2 * std::log(c.rope_theta));
  };
  double low = find_correction_dim(c.beta_fast), high = find_correction_dim(c.beta_slow);
  if (c.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  std::vector<double> inv_freq;
  for (uint32_t i = 0; i < c.rotary_dim / 2; ++i) {
    const double pos_freq = std::pow(c.rope_theta, 2.0 * i / dim), extrapolation = 1 / pos_freq;
    const double interpolation = 1 / (c.factor * pos_freq);
    const double extrapolation_factor = 1 - std::clamp((i - low) / (high - low), 0.0, 1.0);
    inv_freq.push_back(interpolation * (1 - extrapolation_factor) +
                       extrapolation * extrapolation_factor);
  }
  return inv_freq;
}

std::vector<double> llama3_inv_freq(const RopeConfig& c) {
  const double old_context_len = c.original_max_position_embeddings;
  const double low_freq_wavelen = old_context_len / c.low_freq_factor;
  const double high_freq_wavelen = old_context_len / c.high_freq_factor;
  std::vector<double> inv_freq = default_inv_freq(c.rope_theta, c.rotary_dim);
  for (double& f : inv_freq) {
    const double wavelen = 2 * kPi / f;
    const double smooth =
        (old_context_len / wavelen - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
    if (wavelen > low_freq_wavelen) {
      f = f / c.factor;
    } else if (wavelen >= high_freq_wavelen) {
      f = (1 - smooth) * f / c.factor + smooth * f;
    }
  }
  return inv_freq;
}

void expect_same(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i] / expected[i], 1, 1e-13) << "pair " << i;
  }
}

struct Known {
  size_t pair;
  double radians;
};

void expect_known(const RopeConfig& config, const std::vector<Known>& known) {
  const RopeFrequencies got = rope_frequencies(config);
  ASSERT_EQ(got.inverse.size(), config.rotary_dim / 2);
  for (const auto& [pair, radians] : known) {
    EXPECT_NEAR(got.inverse[pair] / radians, 1, 1e-13) << "pair " << pair;
  }
}

TEST(RopeFrequencies, Standard) {
  const RopeFrequencies got = rope_frequencies({.rope_theta = 10000, .rotary_dim = 8});
  expect_same(got.inverse, {1, 0.1, 0.01, 0.001});
  EXPECT_EQ(got.attention_factor, 1.0);
  expect_same(rope_frequencies({.rope_theta = 1e7, .rotary_dim = 96}).inverse,
              default_inv_freq(1e7, 96));
  expect_same(rope_frequencies({.rotary_dim = 2}).inverse, {1});
}

TEST(RopeFrequencies, LinearDividesAll) {
  const RopeFrequencies got = rope_frequencies(
      {.rope_theta = 10000, .rotary_dim = 8, .rope_type = RopeType::linear, .factor = 4});
  expect_same(got.inverse, {0.25, 0.025, 0.0025, 0.00025});
  EXPECT_EQ(got.attention_factor, 1.0);
}

// NTK: the fastest pair stays, the slowest is `factor` times slower.
TEST(RopeFrequencies, NtkStretchesTheSlowestPair) {
  const RopeConfig config{
      .rope_theta = 10000, .rotary_dim = 128, .rope_type = RopeType::ntk, .factor = 4};
  const RopeFrequencies got = rope_frequencies(config);
  const std::vector<double> standard = default_inv_freq(10000, 128);
  EXPECT_EQ(got.inverse[0], 1.0);
  EXPECT_NEAR(got.inverse[63] * 4 / standard[63], 1, 1e-13);
  expect_same(got.inverse, default_inv_freq(10000 * std::pow(4.0, 128.0 / 126.0), 128));
  EXPECT_EQ(got.attention_factor, 1.0);
}

TEST(RopeFrequencies, DynamicFollowsTheLength) {
  RopeConfig config{.rope_theta = 10000,
                    .rotary_dim = 64,
                    .rope_type = RopeType::dynamic,
                    .factor = 2,
                    .original_max_position_embeddings = 2048};
  const std::vector<double> standard = default_inv_freq(10000, 64);
  for (const double within : {0.0, 1.0, 2048.0}) {
    config.seq_len = within;
    expect_same(rope_frequencies(config).inverse, standard);
  }
  config.seq_len = 8192;  // 2 * 8192 / 2048 - (2 - 1) = 7
  const RopeFrequencies got = rope_frequencies(config);
  EXPECT_NEAR(got.inverse[31] * 7 / standard[31], 1, 1e-13);
  expect_same(got.inverse, default_inv_freq(10000 * std::pow(7.0, 64.0 / 62.0), 64));
  EXPECT_EQ(got.attention_factor, 1.0);
}

TEST(RopeFrequencies, YarnOfQwen2_5) {
  expect_known(qwen2_5_yarn(), {{0, 1.0},
                                {23, 0.0069783058485986633841},
                                {24, 0.0053753214907901015038},
                                {30, 0.0010643609812470018163},
                                {39, 0.000064903943208370288244},
                                {40, 0.000044456985250973070031},
                                {63, 3.1023444018792989152e-7}});
  EXPECT_NEAR(rope_frequencies(qwen2_5_yarn()).attention_factor, 1.1386294361119890619, 1e-15);
}

TEST(RopeFrequencies, YarnOfDeepSeekV3) {
  expect_known(deepseek_v3(), {{0, 1.0},
                               {10, 0.056234132519034908039},
                               {11, 0.039006926567143857993},
                               {16, 0.0055},
                               {22, 0.00017782794100389228012},
                               {23, 0.000033338035804083100642},
                               {31, 3.3338035804083100642e-6}});
}

TEST(RopeFrequencies, YarnOfGptOssDoesNotTruncate) {
  expect_known(gpt_oss(), {{0, 1.0},
                           {8, 0.050813274815461473628},
                           {9, 0.031705696184663765988},
                           {12, 0.0067949594897322178331},
                           {17, 0.00012931870124506272061},
                           {18, 0.000038308812373753382914},
                           {31, 3.0235114281192143739e-7}});
  EXPECT_NEAR(rope_frequencies(gpt_oss()).attention_factor, 1.3465735902799726547, 1e-15);
}

TEST(RopeFrequencies, YarnAsDefined) {
  std::vector<RopeConfig> configs = {qwen2_5_yarn(), deepseek_v3(), gpt_oss()};
  configs.push_back(qwen2_5_yarn());
  configs.back().beta_fast = 16;
  configs.back().beta_slow = 2;
  configs.push_back(qwen2_5_yarn());  // the ramp begins before the first pair
  configs.back().original_max_position_embeddings = 40;
  configs.push_back(qwen2_5_yarn());  // and ends behind the last
  configs.back().rope_theta = 3;
  configs.push_back(gpt_oss());  // low == high: a step
  configs.back().beta_slow = configs.back().beta_fast;
  for (const RopeConfig& config : configs)
    expect_same(rope_frequencies(config).inverse, yarn_inv_freq(config));
}

TEST(RopeFrequencies, AttentionFactorOfYarn) {
  const auto factor_of = [](std::optional<double> mscale, std::optional<double> all_dim,
                            std::optional<double> given = std::nullopt) {
    RopeConfig config = deepseek_v3();
    config.mscale = mscale;
    config.mscale_all_dim = all_dim;
    config.attention_factor = given;
    return rope_frequencies(config).attention_factor;
  };
  const double alone = 1.3688879454113936303;  // 0.1 ln 40 + 1
  EXPECT_NEAR(factor_of({}, {}), alone, 1e-15);
  EXPECT_NEAR(factor_of(1.0, 1.0), 1.0, 1e-15);
  EXPECT_NEAR(factor_of(0.707, 1.0), 0.92104235531633989107, 1e-15);
  EXPECT_NEAR(factor_of(0.707, {}), alone, 1e-15) << "counts only with mscale_all_dim";
  EXPECT_NEAR(factor_of({}, 0.707), alone, 1e-15) << "counts only with mscale";
  EXPECT_EQ(factor_of(0.707, 1.0, 0.75), 0.75) << "what the config gives wins";
  RopeConfig shrunk = deepseek_v3();
  shrunk.mscale = shrunk.mscale_all_dim = std::nullopt;
  shrunk.factor = 0.5;
  EXPECT_EQ(rope_frequencies(shrunk).attention_factor, 1.0) << "no factor above 1, no scaling";
}

// In the definition "if mscale and mscale_all_dim" is false for 0, which configs of the DeepSeek
// line hold.
TEST(RopeFrequencies, AnMscaleOfZeroCountsAsAbsent) {
  RopeConfig config = deepseek_v3();
  config.mscale = 0.707;
  config.mscale_all_dim = 0.0;
  EXPECT_NEAR(rope_frequencies(config).attention_factor, 1.3688879454113936303, 1e-15);
  config.mscale = 0.0;
  config.mscale_all_dim = 1.0;
  EXPECT_NEAR(rope_frequencies(config).attention_factor, 1.3688879454113936303, 1e-15);
}

TEST(RopeFrequencies, Llama3) {
  expect_known(llama3_1(), {{0, 1.0},
                            {28, 0.0032114459947525910185},
                            {29, 0.0021665707635033586093},
                            {32, 0.00052484616099295466973},
                            {34, 0.00017850781276799641852},
                            {35, 0.000095562123539646830199},
                            {63, 3.0689259889145110891e-7}});
  expect_known(llama3_2(), {{14, 0.0032114459947525910185},
                            {15, 0.0012905479282092638184},
                            {16, 0.00042955679655936820054},
                            {17, 0.000097082878026276722608},
                            {18, 0.000019461638184831124361},
                            {31, 9.4183067254349098399e-8}});
  EXPECT_EQ(rope_frequencies(llama3_1()).attention_factor, 1.0);
  RopeConfig wide = llama3_1();
  wide.low_freq_factor = 0.5;
  wide.high_freq_factor = 16;
  for (const RopeConfig& config : {llama3_1(), llama3_2(), wide})
    expect_same(rope_frequencies(config).inverse, llama3_inv_freq(config));
}

void expect_refused(const std::vector<std::string>& message, RopeConfig config,
                    void (*change)(RopeConfig&)) {
  change(config);
  std::vector<std::string> parts = message;
  parts.emplace_back("rope_frequencies: ");
  EXPECT_TRUE(refused(parts, [&] { rope_frequencies(config); }));
}

TEST(RopeFrequencies, BadConfigsAreRefused) {
  const RopeConfig plain{.rotary_dim = 8};
  expect_refused({"rotary_dim", "got 0"}, plain, [](RopeConfig& c) { c.rotary_dim = 0; });
  expect_refused({"rotary_dim", "got 7"}, plain, [](RopeConfig& c) { c.rotary_dim = 7; });
  expect_refused({"rotary_dim", "2048", "got 2050"}, plain,
                 [](RopeConfig& c) { c.rotary_dim = 2050; });
  expect_refused({"rotary_dim", "got 4294967294"}, plain,
                 [](RopeConfig& c) { c.rotary_dim = 0xFFFFFFFEu; });
  EXPECT_EQ(rope_frequencies({.rotary_dim = 2048}).inverse.size(), 1024u);
  expect_refused({"rope_theta", "got 0"}, plain, [](RopeConfig& c) { c.rope_theta = 0; });
  expect_refused({"rope_theta", "got -5"}, plain, [](RopeConfig& c) { c.rope_theta = -5; });
  expect_refused({"rope_theta", "got nan"}, plain, [](RopeConfig& c) { c.rope_theta = kNaN; });
  expect_refused({"rope_theta", "got inf"}, plain, [](RopeConfig& c) { c.rope_theta = kInfinity; });
  const RopeConfig linear{.rotary_dim = 8, .rope_type = RopeType::linear, .factor = 2};
  expect_refused({"factor", "got 0"}, linear, [](RopeConfig& c) { c.factor = 0; });
  expect_refused({"factor", "got -2"}, linear, [](RopeConfig& c) { c.factor = -2; });
  expect_refused({"factor", "got nan"}, linear, [](RopeConfig& c) { c.factor = kNaN; });
  const RopeConfig ntk{.rotary_dim = 8, .rope_type = RopeType::ntk, .factor = 2};
  expect_refused({"rope_theta 1e+300", "factor 1e+300", "not finite"}, ntk,
                 [](RopeConfig& c) { c.rope_theta = c.factor = 1e300; });
  expect_refused({"rotary_dim above 2", "got 2"}, ntk, [](RopeConfig& c) { c.rotary_dim = 2; });
  const RopeConfig dynamic{.rotary_dim = 8,
                           .rope_type = RopeType::dynamic,
                           .factor = 2,
                           .original_max_position_embeddings = 2048};
  expect_refused({"original_max_position_embeddings", "got 0"}, dynamic,
                 [](RopeConfig& c) { c.original_max_position_embeddings = 0; });
  expect_refused({"seq_len", "got inf"}, dynamic, [](RopeConfig& c) { c.seq_len = kInfinity; });
  expect_refused({"factor", "got 0.5"}, dynamic, [](RopeConfig& c) { c.factor = 0.5; });
}

TEST(RopeFrequencies, BadYarnAndLlama3ConfigsAreRefused) {
  using C = RopeConfig;
  const C yarn = qwen2_5_yarn(), llama = llama3_1();
  expect_refused({"original_max_position_embeddings", "got 0"}, yarn,
                 [](C& c) { c.original_max_position_embeddings = 0; });
  expect_refused({"beta_fast", "got 0"}, yarn, [](C& c) { c.beta_fast = 0; });
  expect_refused({"beta_slow", "got -1"}, yarn, [](C& c) { c.beta_slow = -1; });
  expect_refused({"beta_fast must be at least beta_slow 32", "got 1"}, yarn,
                 [](C& c) { c.beta_fast = 1, c.beta_slow = 32; });
  expect_refused({"attention_factor", "got nan"}, yarn, [](C& c) { c.attention_factor = kNaN; });
  expect_refused({"mscale must be finite", "got inf"}, yarn, [](C& c) { c.mscale = kInfinity; });
  expect_refused({"mscale_all_dim must be finite", "got nan"}, yarn,
                 [](C& c) { c.mscale_all_dim = kNaN; });
  // 1 + 0.1 * mscale * log(2) is zero for the divisor.
  expect_refused({"attention factor must be finite", "got"}, yarn, [](C& c) {
    c.factor = 2;
    c.mscale = 1e308;
    c.mscale_all_dim = -10 / std::log(2.0);
  });
  expect_refused({"rope_theta other than 1"}, yarn, [](C& c) { c.rope_theta = 1; });
  expect_refused({"original_max_position_embeddings", "got nan"}, llama,
                 [](C& c) { c.original_max_position_embeddings = kNaN; });
  expect_refused({"low_freq_factor", "got 0"}, llama, [](C& c) { c.low_freq_factor = 0; });
  expect_refused({"high_freq_factor", "low_freq_factor 1", "got 1"}, llama,
                 [](C& c) { c.high_freq_factor = 1; });
  expect_refused({"high_freq_factor", "got inf"}, llama,
                 [](C& c) { c.high_freq_factor = kInfinity; });
}

// Numbers that are fine each, and what they give together is not.
TEST(RopeFrequencies, ResultsThatAreNotFiniteAreRefused) {
  expect_refused({"rope_theta 1e-300", "not finite"}, {.rotary_dim = 128}, [](RopeConfig& c) {
    c.rope_theta = 1e-300, c.rope_type = RopeType::linear, c.factor = 1e-20;
  });
  expect_refused({"factor 1e-310", "not finite"}, {.rotary_dim = 128},
                 [](RopeConfig& c) { c.rope_type = RopeType::linear, c.factor = 1e-310; });
}

TEST(RopeFrequencies, AnUnknownTypeIsRefused) {
  expect_refused({"77"}, {.rotary_dim = 8},
                 [](RopeConfig& c) { c.rope_type = static_cast<RopeType>(77); });
}

TEST(RopeTable, RefusesWhatIsNotFinite) {
  const Device device = Device::open("cpu", {.threads = 1});
  for (const double bad : {kInfinity, -kInfinity, kNaN}) {
    const double radians[] = {1.0, bad};
    EXPECT_REFUSED(("rope_table: ", "finite"), rope_table(device, radians));
  }
  const double radians[] = {1.0, 0.5, 0.25};
  const std::span<const double> endless(radians, size_t{1} << 60);  // never read
  EXPECT_REFUSED(("rope_table: at most 1024"), rope_table(device, endless));
  const Tensor table = rope_table(device, radians);
  EXPECT_EQ(table.dtype(), DType::u32);
  EXPECT_EQ(table.shape(), (Dims{3, 2}));
}

}  // namespace
}  // namespace gyre::test
