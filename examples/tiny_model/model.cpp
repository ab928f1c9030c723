#include "model.h"

#include <algorithm>
#include <string>

namespace tiny_model {
namespace {

gyre::KvCacheOptions cache_options(const Config& config, const gyre::KvLayer& stored,
                                   uint64_t capacity) {
  gyre::KvCacheOptions options{
      .kv_heads = config.kv_heads, .head_dim = config.head_dim, .capacity = capacity, .layers = {}};
  for (const uint64_t window : config.windows) {
    gyre::KvLayer layer = stored;
    layer.window = window;
    options.layers.push_back(layer);
  }
  options.step_tokens = std::min(options.step_tokens, capacity);
  return options;
}

// The tensor's elements as a matrix with a row per token.
Eigen::Map<Rows> rows(const gyre::Tensor& tensor) {
  const auto tokens = static_cast<Eigen::Index>(tensor.shape(0));
  return {tensor.data<float>().data(), tokens,
          static_cast<Eigen::Index>(tensor.elements()) / tokens};
}

Rows rms_norm(const Rows& x, const RowVector& weight, float epsilon) {
  const Eigen::ArrayXf mean_square = x.rowwise().squaredNorm() / static_cast<float>(x.cols());
  return (x.array().colwise() * (mean_square + epsilon).rsqrt()).rowwise() * weight.array();
}

Rows swiglu(const Rows& gate, const Rows& up) {
  return gate.array() / (1 + (-gate.array()).exp()) * up.array();
}

}  // namespace

Model::Model(const gyre::Device& device, const Config& config, const SafeTensors& file,
             const gyre::KvLayer& stored, uint64_t capacity)
    : device_(device),
      config_(config),
      weights_(load_weights(file, config, device)),
      cache_(device, cache_options(config, stored, capacity)),
      encoder_(device),
      decode_step_(make_step(1)) {
  const gyre::RopeFrequencies frequencies = gyre::rope_frequencies(config.rope);
  rope_table_ = gyre::rope_table(device, frequencies.inverse);
  rope_.magnitude = static_cast<float>(frequencies.attention_factor);
}

Model::Step Model::make_step(uint64_t tokens) const {
  const gyre::Dims q = {tokens, config_.heads, config_.head_dim};
  const gyre::Dims kv = {tokens, config_.kv_heads, config_.head_dim};
  return {.q = device_.tensor(gyre::DType::f32, q),
          .k = device_.tensor(gyre::DType::f32, kv),
          .v = device_.tensor(gyre::DType::f32, kv),
          .out = device_.tensor(gyre::DType::f32, q)};
}

// Gyre's part of a layer: QK norm and rotation in place, K and V into the cache, attention.
void Model::record_attention(size_t layer, const Step& step) {
  const LayerWeights& weights = weights_.layers[layer];
  cache_.rope_append(encoder_, layer,
                     {.q = step.q,
                      .q_out = step.q,
                      .k = step.k,
                      .v = step.v,
                      .q_weight = weights.q_norm,
                      .k_weight = weights.k_norm,
                      .frequencies = rope_table_},
                     {.rope = rope_, .norm = gyre::RopeNorm{.epsilon = config_.epsilon}});
  cache_.attend(encoder_, layer, {.q = step.q, .out = step.out},
                {.scale = config_.attention_scale});
}

void Model::check(std::span<const int32_t> tokens) const {
  const auto refuse = [](const std::string& why) {
    throw gyre::Error(gyre::ErrorCode::invalid_argument, "tiny_model: " + why);
  };
  const uint64_t free = cache_.options().capacity - cache_.length();
  if (tokens.empty() || tokens.size() > free) {
    refuse("there must be from 1 to " + std::to_string(free) + " tokens, got " +
           std::to_string(tokens.size()));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= weights_.embedding.rows()) {
      refuse("a token must be from 0 to " + std::to_string(weights_.embedding.rows() - 1) +
             ", got " + std::to_string(token));
    }
  }
}

// Reserves slots and sets positions for all layers.
void Model::begin(uint64_t tokens) {
  cache_.extend(encoder_, tokens);
  encoder_.submit().wait();
}

RowVector Model::prefill(std::span<const int32_t> tokens) {
  check(tokens);
  RowVector logits;
  while (!tokens.empty()) {
    const auto part = tokens.first(std::min<size_t>(tokens.size(), cache_.options().step_tokens));
    tokens = tokens.subspan(part.size());
    const Step step = make_step(part.size());
    logits = forward(part, step, [&](size_t layer) {
      record_attention(layer, step);
      encoder_.submit().wait();
    });
  }
  return logits;
}

RowVector Model::decode(int32_t token) {
  check({&token, 1});
  return forward({&token, 1}, decode_step_, [&](size_t layer) {
    // A graph reads where the sequence is from device memory: it serves every later token.
    if (decode_graphs_.size() == layer) {
      record_attention(layer, decode_step_);
      decode_graphs_.push_back(encoder_.instantiate());
    }
    decode_graphs_[layer].replay().wait();
  });
}

Rows Model::embed(std::span<const int32_t> tokens) const {
  Rows hidden(static_cast<Eigen::Index>(tokens.size()), weights_.embedding.cols());
  for (size_t i = 0; i < tokens.size(); ++i) {
    hidden.row(static_cast<Eigen::Index>(i)) = weights_.embedding.row(tokens[i]);
  }
  return hidden;
}

template <class Attend>
RowVector Model::forward(std::span<const int32_t> tokens, const Step& step, const Attend& attend) {
  Rows hidden = embed(tokens);
  begin(tokens.size());
  for (size_t layer = 0; layer < weights_.layers.size(); ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    Rows normed = rms_norm(hidden, w.input_norm, config_.epsilon);
    rows(step.q).noalias() = normed * w.q.transpose();
    rows(step.k).noalias() = normed * w.k.transpose();
    rows(step.v).noalias() = normed * w.v.transpose();
    attend(layer);
    hidden.noalias() += rows(step.out) * w.o.transpose();

    normed = rms_norm(hidden, w.post_attention_norm, config_.epsilon);
    const Rows inner = swiglu(normed * w.gate.transpose(), normed * w.up.transpose());
    hidden.noalias() += inner * w.down.transpose();
  }
  return rms_norm(hidden.bottomRows(1), weights_.norm, config_.epsilon) *
         weights_.output.transpose();
}

}  // namespace tiny_model
