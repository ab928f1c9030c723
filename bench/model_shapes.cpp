#include "model_shapes.h"

#include <vector>

#include "did_you_mean.h"
#include "gyre/kv_cache.h"
#include "runtime/require.h"

namespace gyre::bench {

std::span<const ModelShape> model_shapes() {
  // From the models' published configurations: layers, heads, KV heads, head_dim, window, every
  // so many-th layer full, rotary part of a latent.
  static const std::vector<ModelShape> kShapes = {
      {"deepseek-v3", 61, 128, 1, 512, 0, 0, 64},
      {"glm-5", 78, 64, 1, 512, 0, 0, 64},
      {"kimi-k2", 61, 64, 1, 512, 0, 0, 64},
      {"gemma-3-4b", 34, 8, 4, 256, 1024, 6},
      {"gemma-3-27b", 62, 32, 16, 128, 1024, 6},
      {"gpt-oss-20b", 24, 64, 8, 64, 128, 2},
      {"gpt-oss-120b", 36, 64, 8, 64, 128, 2},
      {"llama-3.1-8b", 32, 32, 8, 128},
      {"llama-3.1-70b", 80, 64, 8, 128},
      {"llama-3.2-1b", 16, 32, 8, 64},
      {"llama-3.2-3b", 28, 24, 8, 128},
      {"mistral-7b-v0.3", 32, 32, 8, 128},
      {"phi-4", 40, 40, 10, 128},
      {"qwen3-0.6b", 28, 16, 8, 128},
      {"qwen3-8b", 36, 32, 8, 128},
      {"qwen3-30b-a3b", 48, 32, 4, 128},
      {"qwen3-32b", 64, 64, 8, 128},
      {"smollm2-1.7b", 24, 32, 32, 64},
  };
  return kShapes;
}

const ModelShape& model_shape(std::string_view name) {
  std::vector<std::string> names;
  for (const ModelShape& shape : model_shapes()) {
    if (shape.name == name) return shape;
    names.push_back(shape.name);
  }
  refuse_name("no preset", name, names);
}

void check(const ModelShape& shape) {
  constexpr uint64_t kMax = 1024;  // of each; keeps every product far below 64 bits
  const auto within = [](const char* what, uint64_t value, uint64_t limit) {
    require(value != 0 && value <= limit, "compare: ", what, " must be from 1 to ", limit, ", got ",
            value);
  };
  within("layers", shape.layers, kMax);
  within("heads", shape.heads, kMax);
  within("kv_heads", shape.kv_heads, kMax);
  within("head_dim", shape.head_dim, kMax);
  require(!shape.latent() || shape.kv_heads == 1, "compare: ", shape.name,
          " is latent, it has one KV head, got ", shape.kv_heads);
  require(shape.heads % shape.kv_heads == 0, "compare: heads must be a multiple of kv_heads, got ",
          shape.heads, " and ", shape.kv_heads);
}

uint64_t full_layers(const ModelShape& shape) {
  uint64_t count = 0;
  for (const KvLayer& layer :
       kv_layers(shape.layers, {.window = shape.window, .full_every = shape.full_every})) {
    count += layer.window == 0 ? 1 : 0;
  }
  return count;
}

}  // namespace gyre::bench
