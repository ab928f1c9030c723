// The files that examples/tiny_model reads, when they are not what they should be.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "config.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "safetensors.h"

namespace tiny_model {
namespace {

using gyre::test::throws_error;
using nlohmann::json;

class TinyModelFiles : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  void write(uint64_t header_bytes, const std::string& rest) const {
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
    file << rest;
  }
  void write_tensor(const json& entry, const std::string& data) const {
    const std::string header = json{{"x", entry}}.dump();
    write(header.size(), header + data);
  }
  testing::AssertionResult file_refused(const std::vector<std::string>& parts) const {
    return throws_error(gyre::ErrorCode::io, parts, [&] { SafeTensors file(path_); });
  }
  testing::AssertionResult tensor_refused(const json& entry, const std::string& data,
                                          const std::vector<std::string>& parts) const {
    write_tensor(entry, data);
    return file_refused(parts);
  }

  const std::filesystem::path path_ = std::filesystem::path(testing::TempDir()) / file_name();

 private:
  static std::string file_name() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    return std::string("gyre_") + test->name() + ".safetensors";
  }
};

json entry(const json& dtype, const json& shape, const json& offsets) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", offsets}};
}

TEST_F(TinyModelFiles, FloatsOfEveryTypeAreRead) {
  const std::vector<float> expected = {1.0f, -2.0f};
  write_tensor(entry("BF16", {1, 2}, {2, 6}), std::string("..\x80\x3F\x00\xC0", 6));
  EXPECT_EQ(SafeTensors(path_).floats("x", {1, 2}), expected);
  write_tensor(entry("F16", {2}, {0, 4}), std::string("\x00\x3C\x00\xC0", 4));
  EXPECT_EQ(SafeTensors(path_).floats("x", {2}), expected);
  write_tensor(entry("F32", {2}, {0, 8}), std::string("\x00\x00\x80\x3F\x00\x00\x00\xC0", 8));
  EXPECT_EQ(SafeTensors(path_).floats("x", {2}), expected);
  write_tensor(entry("I32", {1}, {0, 4}), std::string("\xFE\xFF\xFF\xFF", 4));
  EXPECT_EQ(SafeTensors(path_).integers("x"), std::vector<int32_t>{-2});
}

TEST_F(TinyModelFiles, DamagedHeadersAreRefused) {
  EXPECT_TRUE(file_refused({"cannot be opened"}));
  std::ofstream(path_) << "short";
  EXPECT_TRUE(file_refused({"no header"}));
  write(3, "{}");
  EXPECT_TRUE(file_refused({"the header has 3 bytes, the file 10"}));
  write(UINT64_MAX, "{}");
  EXPECT_TRUE(file_refused({"18446744073709551615"}));
  write(2, "{x");
  EXPECT_TRUE(file_refused({"not a JSON object"}));
  write(2, "[]");
  EXPECT_TRUE(file_refused({"not a JSON object"}));
}

TEST_F(TinyModelFiles, EntriesThatDoNotFitAreRefused) {
  EXPECT_TRUE(tensor_refused(entry("F32", {2}, {0, 9}), "12345678", {"within 8 bytes"}));
  EXPECT_TRUE(tensor_refused(entry("F32", {0}, {8, 4}), "12345678", {"within 8 bytes"}));
  EXPECT_TRUE(tensor_refused(entry("F32", {0}, {9, 9}), "12345678", {"within 8 bytes"}));
  EXPECT_TRUE(tensor_refused(entry("F32", {3}, {0, 8}), "12345678", {"does not have 8 bytes"}));
  // 2^62 elements of 4 bytes are 0 modulo 2^64.
  const uint64_t many = uint64_t{1} << 31;
  EXPECT_TRUE(tensor_refused(entry("F32", {many, many}, {0, 0}), "", {"does not have 0 bytes"}));
  const json right = entry("F32", {2}, {0, 8});
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    for (const json& wrong : {json(), json(-1), json(1.5), json({-1, 0}), json({0, 1, 2})}) {
      if (key == std::string("shape") && wrong == json({0, 1, 2})) continue;  // a shape
      json changed = right;
      changed[key] = wrong;
      EXPECT_TRUE(tensor_refused(changed, "12345678", {"x", changed.dump()})) << changed;
    }
  }
  EXPECT_TRUE(tensor_refused(json(7), "", {"x must have a dtype"}));
}

TEST_F(TinyModelFiles, WhatIsNotThereIsRefused) {
  write_tensor(entry("I64", {1}, {0, 8}), "12345678");
  const SafeTensors file(path_);
  EXPECT_ERROR(io, ("no tensor y"), file.floats("y", {1}));
  EXPECT_ERROR(io, ("shape [2]", "got [1]"), file.floats("x", {2}));
  EXPECT_ERROR(io, ("F32, F16 or BF16, got I64"), file.floats("x", {1}));
  EXPECT_ERROR(io, ("I32, got I64"), file.integers("x"));
}

json stored_config() {
  return json::parse(std::ifstream(std::filesystem::path(TINY_MODEL_DATA) / "config.json"));
}

TEST(TinyModelConfig, RopeIsReadAsBothVersionsWriteIt) {
  json config = stored_config();
  EXPECT_EQ(parse_config(config).rope.rope_theta, 100000);
  config.erase("rope_parameters");
  config["rope_theta"] = 5e5;
  EXPECT_EQ(parse_config(config).rope.rope_theta, 5e5);
  config["rope_scaling"] = {
      {"type", "yarn"},  {"factor", 4.0}, {"original_max_position_embeddings", 4096},
      {"beta_fast", 16}, {"mscale", 0.7}, {"truncate", false}};
  const gyre::RopeConfig rope = parse_config(config).rope;
  EXPECT_EQ(rope.rope_type, gyre::RopeType::yarn);
  EXPECT_EQ(rope.rope_theta, 5e5);
  EXPECT_EQ(rope.rotary_dim, 128u);
  EXPECT_EQ(rope.factor, 4);
  EXPECT_EQ(rope.original_max_position_embeddings, 4096);
  EXPECT_EQ(rope.beta_fast, 16);
  EXPECT_EQ(rope.beta_slow, 1);
  EXPECT_EQ(rope.mscale, 0.7);
  EXPECT_FALSE(rope.mscale_all_dim);
  EXPECT_FALSE(rope.truncate);
}

TEST(TinyModelConfig, WhatWouldRunWronglyIsRefused) {
  const std::vector<std::pair<const char*, json>> changes = {
      {"model_type", "llama"},
      {"hidden_act", "gelu"},
      {"attention_bias", true},
      {"vocab_size", 0},
      {"hidden_size", -256},
      {"head_dim", 1e30},
      {"head_dim", 128.5},
      {"num_attention_heads", "8"},
      {"num_hidden_layers", uint64_t{1} << 60},
      {"rms_norm_eps", nullptr},
      {"partial_rotary_factor", 0.5},
      {"rope_parameters", 3},
      {"rope_parameters", json::object()},
      {"rope_parameters", {{"rope_theta", 1e4}, {"rope_type", "longrope"}}},
      {"rope_parameters", {{"rope_theta", 1e4}, {"rope_type", "linear"}}},
  };
  for (const auto& [key, value] : changes) {
    json config = stored_config();
    config[key] = value;
    EXPECT_TRUE(
        throws_error(gyre::ErrorCode::unsupported, {"config.json"}, [&] { parse_config(config); }))
        << key << ' ' << value;
  }
  json config = stored_config();
  config["use_sliding_window"] = true;
  config["sliding_window"] = 64;
  config["layer_types"] = json::array({"full_attention"});
  EXPECT_TRUE(
      throws_error(gyre::ErrorCode::unsupported, {"layer_types"}, [&] { parse_config(config); }));
  config["layer_types"] = {"full_attention", "chunked_attention", "full_attention",
                           "full_attention"};
  EXPECT_TRUE(throws_error(gyre::ErrorCode::unsupported, {"chunked_attention"},
                           [&] { parse_config(config); }));
}

}  // namespace
}  // namespace tiny_model
