#pragma once
// The weights of a Qwen3 model: matrices for Eigen, the weights of the QK norm on the device.
#include <gyre/tensor.h>

#include <Eigen/Core>
#include <vector>

#include "config.h"
#include "safetensors.h"

namespace tiny_model {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::RowVectorXf;

struct LayerWeights {
  RowVector input_norm, post_attention_norm;
  Rows q, k, v, o;  // [out, in], as in the file
  Rows gate, up, down;
  gyre::Tensor q_norm, k_norm;  // [head_dim]
};

struct Weights {
  Rows embedding;  // [vocabulary, hidden]
  std::vector<LayerWeights> layers;
  RowVector norm;
  Rows output;  // [vocabulary, hidden]
};

Weights load_weights(const SafeTensors& file, const Config& config, const gyre::Device& device);

}  // namespace tiny_model
