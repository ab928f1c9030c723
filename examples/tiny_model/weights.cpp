#include "weights.h"

#include <gyre/device.h>

#include <span>
#include <string>

namespace tiny_model {
namespace {

class Loader {
 public:
  Loader(const SafeTensors& file, const gyre::Device& device) : file_(file), device_(device) {}

  std::vector<float> floats(const std::string& name, const std::vector<uint64_t>& shape) const {
    return file_.floats(name + ".weight", shape);
  }
  gyre::Tensor matrix(const std::string& name, uint64_t rows, uint64_t columns) const {
    return put(floats(name, {rows, columns}), {rows, columns});
  }
  gyre::Tensor vector(const std::string& name, uint64_t size) const {
    return put(floats(name, {size}), {size});
  }
  gyre::Tensor put(const std::vector<float>& values, const gyre::Dims& shape) const {
    gyre::Tensor tensor = device_.tensor(gyre::DType::f32, shape);
    tensor.write_from(std::span<const float>(values));
    return tensor;
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
          .q_norm = load.vector(attention + "q_norm", config.head_dim),
          .k_norm = load.vector(attention + "k_norm", config.head_dim)};
}

}  // namespace

Weights load_weights(const SafeTensors& file, const Config& config, const gyre::Device& device) {
  const Loader load(file, device);
  Weights weights;
  const std::vector<float> embedding =
      load.floats("model.embed_tokens", {config.vocabulary, config.hidden});
  weights.embedding =
      Eigen::Map<const Rows>(embedding.data(), static_cast<Eigen::Index>(config.vocabulary),
                             static_cast<Eigen::Index>(config.hidden));
  for (size_t layer = 0; layer < config.windows.size(); ++layer) {
    weights.layers.push_back(load_layer(load, config, layer));
  }
  weights.norm = load.vector("model.norm", config.hidden);
  weights.output = config.tied_embeddings
                       ? load.put(embedding, {config.vocabulary, config.hidden})
                       : load.matrix("lm_head", config.vocabulary, config.hidden);
  return weights;
}

}  // namespace tiny_model
