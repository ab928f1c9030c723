#include "weights.h"

#include <gyre/device.h>

#include <span>
#include <string>

namespace tiny_model {
namespace {

class Loader {
 public:
  Loader(const SafeTensors& file, const gyre::Device& device) : file_(file), device_(device) {}

  Rows matrix(const std::string& name, uint64_t rows, uint64_t columns) const {
    const std::vector<float> values = file_.floats(name + ".weight", {rows, columns});
    return Eigen::Map<const Rows>(values.data(), static_cast<Eigen::Index>(rows),
                                  static_cast<Eigen::Index>(columns));
  }
  RowVector vector(const std::string& name, uint64_t size) const {
    const std::vector<float> values = file_.floats(name + ".weight", {size});
    return Eigen::Map<const RowVector>(values.data(), static_cast<Eigen::Index>(size));
  }
  gyre::Tensor tensor(const std::string& name, uint64_t size) const {
    gyre::Tensor result = device_.tensor(gyre::DType::f32, {size});
    result.write_from(std::span<const float>(file_.floats(name + ".weight", {size})));
    return result;
  }

 private:
  const SafeTensors& file_;
  const gyre::Device& device_;
};

LayerWeights load_layer(const Loader& load, const Config& config, size_t layer) {
  const std::string name = "model.layers." + std::to_string(layer) + '.';
  const std::string attention = name + "self_attn.", mlp = name + "mlp.";
  const uint64_t q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
  const uint64_t hidden = config.hidden, inner = config.intermediate;
  return {.input_norm = load.vector(name + "input_layernorm", hidden),
          .post_attention_norm = load.vector(name + "post_attention_layernorm", hidden),
          .q = load.matrix(attention + "q_proj", q, hidden),
          .k = load.matrix(attention + "k_proj", kv, hidden),
          .v = load.matrix(attention + "v_proj", kv, hidden),
          .o = load.matrix(attention + "o_proj", hidden, q),
          .gate = load.matrix(mlp + "gate_proj", inner, hidden),
          .up = load.matrix(mlp + "up_proj", inner, hidden),
          .down = load.matrix(mlp + "down_proj", hidden, inner),
          .q_norm = load.tensor(attention + "q_norm", config.head_dim),
          .k_norm = load.tensor(attention + "k_norm", config.head_dim)};
}

}  // namespace

Weights load_weights(const SafeTensors& file, const Config& config, const gyre::Device& device) {
  const Loader load(file, device);
  Weights weights;
  weights.embedding = load.matrix("model.embed_tokens", config.vocabulary, config.hidden);
  for (size_t layer = 0; layer < config.windows.size(); ++layer) {
    weights.layers.push_back(load_layer(load, config, layer));
  }
  weights.norm = load.vector("model.norm", config.hidden);
  weights.output = config.tied_embeddings
                       ? weights.embedding
                       : load.matrix("lm_head", config.vocabulary, config.hidden);
  return weights;
}

}  // namespace tiny_model
