#include "config.h"

#include <gyre/error.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace tiny_model {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxSize = 1 << 24;  // of any dimension: products of two fit in 64 bits
constexpr uint64_t kMaxLayers = 1024;

[[noreturn]] void refuse(const std::string& why) {
  throw gyre::Error(gyre::ErrorCode::unsupported, "config.json: " + why);
}

// Null where the field is missing or null.
const json& field(const json& object, const char* key) {
  static const json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

uint64_t count(const json& object, const char* key, uint64_t limit = kMaxSize) {
  const json& value = field(object, key);
  if (!value.is_number_unsigned() || value == 0 || value > limit) {
    refuse(std::string(key) + " must be from 1 to " + std::to_string(limit) + ", got " +
           value.dump());
  }
  return value.get<uint64_t>();
}

double number(const json& object, const char* key) {
  const json& value = field(object, key);
  if (!value.is_number()) refuse(std::string(key) + " must be a number, got " + value.dump());
  return value.get<double>();
}

std::optional<double> optional_number(const json& object, const char* key) {
  if (field(object, key).is_null()) return std::nullopt;
  return number(object, key);
}

void require_value(const json& object, const char* key, const json& expected) {
  const json& value = field(object, key);
  if (value != expected) {
    refuse(std::string(key) + " must be " + expected.dump() + ", got " + value.dump());
  }
}

gyre::RopeType rope_type(const json& rope) {
  // `dynamic` and `longrope` change with the length of the sequence: they need new frequencies as
  // it grows, which this example does not make.
  static const std::map<std::string, gyre::RopeType> kTypes = {
      {"default", gyre::RopeType::standard},
      {"linear", gyre::RopeType::linear},
      {"yarn", gyre::RopeType::yarn},
      {"llama3", gyre::RopeType::llama3}};
  const json& type = field(rope, rope.contains("rope_type") ? "rope_type" : "type");
  if (type.is_null()) return gyre::RopeType::standard;
  const auto found = kTypes.find(type.is_string() ? type.get<std::string>() : "");
  if (found == kTypes.end()) {
    refuse("rope_type must be default, linear, yarn or llama3, got " + type.dump());
  }
  return found->second;
}

// transformers 5 has everything in rope_parameters; before, rope_theta stood beside rope_scaling.
gyre::RopeConfig rope_config(const json& config, uint64_t head_dim) {
  json rope =
      field(config, config.contains("rope_parameters") ? "rope_parameters" : "rope_scaling");
  if (rope.is_null()) rope = json::object();
  if (!rope.is_object()) refuse("the rope parameters must be one object, got " + rope.dump());
  if (!rope.contains("rope_theta")) rope["rope_theta"] = field(config, "rope_theta");
  if (rope.contains("partial_rotary_factor") || config.contains("partial_rotary_factor")) {
    refuse("partial_rotary_factor is not supported here");
  }

  gyre::RopeConfig result{.rope_theta = number(rope, "rope_theta"),
                          .rotary_dim = static_cast<uint32_t>(head_dim),
                          .rope_type = rope_type(rope)};
  if (result.rope_type == gyre::RopeType::standard) return result;
  result.factor = number(rope, "factor");
  if (result.rope_type == gyre::RopeType::linear) return result;
  result.original_max_position_embeddings = number(rope, "original_max_position_embeddings");
  if (result.rope_type == gyre::RopeType::llama3) {
    result.low_freq_factor = number(rope, "low_freq_factor");
    result.high_freq_factor = number(rope, "high_freq_factor");
    return result;
  }
  result.beta_fast = optional_number(rope, "beta_fast").value_or(result.beta_fast);
  result.beta_slow = optional_number(rope, "beta_slow").value_or(result.beta_slow);
  result.attention_factor = optional_number(rope, "attention_factor");
  result.mscale = optional_number(rope, "mscale");
  result.mscale_all_dim = optional_number(rope, "mscale_all_dim");
  result.truncate = field(rope, "truncate") != false;
  return result;
}

std::vector<uint64_t> layer_windows(const json& config) {
  std::vector<uint64_t> windows(count(config, "num_hidden_layers", kMaxLayers), 0);
  if (field(config, "use_sliding_window") != true) return windows;
  const json& types = field(config, "layer_types");
  if (!types.is_array() || types.size() != windows.size()) {
    refuse("layer_types must have an entry for each layer, got " + types.dump());
  }
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    if (types[layer] == "sliding_attention") {
      windows[layer] = count(config, "sliding_window");
    } else if (types[layer] != "full_attention") {
      refuse("a layer must be full_attention or sliding_attention, got " + types[layer].dump());
    }
  }
  return windows;
}

}  // namespace

Config parse_config(const json& config) {
  require_value(config, "model_type", "qwen3");
  require_value(config, "hidden_act", "silu");
  require_value(config, "attention_bias", false);
  Config result{.vocabulary = count(config, "vocab_size"),
                .hidden = count(config, "hidden_size"),
                .intermediate = count(config, "intermediate_size"),
                .heads = count(config, "num_attention_heads"),
                .kv_heads = count(config, "num_key_value_heads"),
                .head_dim = count(config, "head_dim"),
                .tied_embeddings = field(config, "tie_word_embeddings") == true,
                .epsilon = static_cast<float>(number(config, "rms_norm_eps"))};
  result.attention_scale = 1.0f / std::sqrt(static_cast<float>(result.head_dim));
  result.rope = rope_config(config, result.head_dim);
  result.windows = layer_windows(config);
  return result;
}

Config read_config(const std::filesystem::path& path) {
  std::ifstream file(path);
  const json config = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    throw gyre::Error(gyre::ErrorCode::io, path.string() + " is not a JSON object");
  }
  return parse_config(config);
}

}  // namespace tiny_model
