#pragma once
// A model's config.json, as far as this example runs it. docs/model_config.md lists what else there
// is and which Gyre option it becomes.
#include <gyre/rope.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace tiny_model {

struct Config {
  uint64_t vocabulary = 0;
  uint64_t hidden = 0;
  uint64_t intermediate = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;
  uint64_t head_dim = 0;
  bool tied_embeddings = true;
  float epsilon = 0;              // of every RMS norm
  float attention_scale = 0;      // multiplies q k^T
  gyre::RopeConfig rope;          // rope_theta and its scaling
  std::vector<uint64_t> windows;  // per layer: keys that a query sees, 0: all
};

// Both throw gyre::Error for a model that this example would run wrongly.
Config read_config(const std::filesystem::path& path);
Config parse_config(const nlohmann::json& config);

}  // namespace tiny_model
