// examples/tiny_model against transformers: logits of the stored model for every kind of cache,
// under every change of the config that has a reference, and with a config that is wrong.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "config.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "model.h"
#include "safetensors.h"

namespace tiny_model {
namespace {

using gyre::KvFormat;
using gyre::KvLayer;
using nlohmann::json;

const std::filesystem::path kFolder = TINY_MODEL_DATA;
const std::filesystem::path kExample = TINY_MODEL_EXAMPLE;

// A stored format, and how far a logit may be from transformers'. Logits lie between -20 and 22;
// measured are 5e-5, 3e-3, 0.06, 0.49 and 0.14.
struct Stored {
  KvLayer layer;
  float bound;
};
constexpr Stored kF32 = {{.k = KvFormat::f32, .v = KvFormat::f32}, 2e-4f};
constexpr Stored kF16 = {{.k = KvFormat::f16, .v = KvFormat::f16}, 1e-2f};
constexpr Stored kTq8 = {{.k = KvFormat::tq8, .v = KvFormat::tq8}, 0.2f};
constexpr Stored kTq8Tq4 = {{.k = KvFormat::tq8, .v = KvFormat::tq4}, 0.8f};
constexpr Stored kTail = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 128}, 0.4f};

json load(const std::filesystem::path& path) { return json::parse(std::ifstream(path)); }

Config config_with(const std::string& change) {
  json config = load(kFolder / "config.json");
  config.update(load(kExample / "reference_changes.json").at(change));
  return parse_config(config);
}

struct Difference {
  float largest = 0;    // of any logit
  size_t same_top = 0;  // rows whose most probable token is the reference's
  size_t rows = 0;
};

// Prefills the prompt, decodes the tokens that follow it, compares what each step predicts.
Difference difference(const Config& config, const KvLayer& stored, const std::string& reference) {
  const SafeTensors file(kExample / "reference.safetensors");
  const std::vector<int32_t> tokens = file.integers("tokens");
  const uint64_t count = file.shape(reference).at(0), vocabulary = config.vocabulary;
  const std::vector<float> expected = file.floats(reference, {count, vocabulary});
  Model model(gyre::Device::open("cpu"), config, SafeTensors(kFolder / "model.safetensors"), stored,
              tokens.size());

  const size_t prompt = tokens.size() - count;
  RowVector logits = model.prefill(std::span(tokens).first(prompt));
  Difference result{.rows = count};
  for (size_t row = 0; row < count; ++row) {
    if (row != 0) logits = model.decode(tokens[prompt + row - 1]);
    const Eigen::Map<const RowVector> truth(expected.data() + row * vocabulary, logits.size());
    result.largest = std::max(result.largest, (logits - truth).cwiseAbs().maxCoeff());
    Eigen::Index top = 0, true_top = 0;
    logits.maxCoeff(&top);
    truth.maxCoeff(&true_top);
    result.same_top += top == true_top ? 1 : 0;
  }
  return result;
}

struct Case {
  const char* change;
  Stored stored;
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const KvLayer& layer = info.param.stored.layer;
  return std::string(info.param.change) + '_' + std::string(gyre::name(layer.k)) + '_' +
         std::string(gyre::name(layer.v)) + "_tail_" + std::to_string(layer.tail);
}

class TinyModelLogits : public testing::TestWithParam<Case> {};

TEST_P(TinyModelLogits, AreThoseOfTransformers) {
  const auto& [change, stored] = GetParam();
  const Difference found =
      difference(config_with(change), stored.layer, std::string("logits.") + change);
  EXPECT_LE(found.largest, stored.bound);
  EXPECT_EQ(found.same_top, found.rows);
  RecordProperty("largest_difference", std::to_string(found.largest));
}

INSTANTIATE_TEST_SUITE_P(All, TinyModelLogits,
                         testing::Values(Case{"plain", kF32}, Case{"plain", kF16},
                                         Case{"plain", kTq8}, Case{"plain", kTq8Tq4},
                                         Case{"plain", kTail}, Case{"window", kF32},
                                         Case{"window", kTq8Tq4}, Case{"linear", kF32},
                                         Case{"llama3", kF32}, Case{"yarn", kF32}),
                         case_name);

// The bounds are tight enough to see what an engine gets wrong.
TEST(TinyModel, AWrongConfigExceedsTheBounds) {
  const Config right = config_with("plain");
  const auto exceeds = [](const Config& wrong, const Stored& stored) {
    return difference(wrong, stored.layer, "logits.plain").largest > stored.bound;
  };
  Config theta = right, scale = right, window = right, epsilon = right;
  theta.rope.rope_theta = 10000;
  scale.attention_scale *= 1.05f;
  window.windows[3] = 100;
  epsilon.epsilon = 1e-5f;
  for (const Config& wrong : {theta, scale, window}) {
    EXPECT_TRUE(exceeds(wrong, kF32));
    EXPECT_TRUE(exceeds(wrong, kTq8Tq4));
  }
  EXPECT_TRUE(exceeds(epsilon, kF32));
}

TEST(TinyModel, RefusesTokensThatAreNotThere) {
  const Config config = config_with("plain");
  Model model(gyre::Device::open("cpu"), config, SafeTensors(kFolder / "model.safetensors"),
              kF32.layer, 4);
  EXPECT_TRUE(gyre::test::refused({"from 0 to 263", "got 264"}, [&] { model.decode(264); }));
  EXPECT_TRUE(gyre::test::refused({"from 0 to 263", "got -1"}, [&] { model.decode(-1); }));
  EXPECT_TRUE(gyre::test::refused({"1 to 4", "got 0"}, [&] { model.prefill({}); }));
  EXPECT_TRUE(
      gyre::test::refused({"1 to 4", "got 5"}, [&] { model.prefill(std::vector<int32_t>(5, 1)); }));
}

}  // namespace
}  // namespace tiny_model
