#pragma once
// The weights of a Qwen3 model, on the device; embeddings are looked up on the host.
#include <gyre/tensor.h>

#include <Eigen/Core>
#include <vector>

#include "config.h"
#include "safetensors.h"

namespace tiny_model {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::RowVectorXf;

struct LayerWeights {
  gyre::Tensor input_norm, post_attention_norm;
  gyre::Tensor q, k, v, o;  // [out, in], as in the file
  gyre::Tensor gate, up, down;
  gyre::Tensor q_norm, k_norm;  // [head_dim]
};

struct Weights {
  Rows embedding;  // [vocabulary, hidden]
  std::vector<LayerWeights> layers;
  gyre::Tensor norm;
  gyre::Tensor output;  // [vocabulary, hidden]
};

Weights load_weights(const SafeTensors& file, const Config& config, const gyre::Device& device);

}  // namespace tiny_model
