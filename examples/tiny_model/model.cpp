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
  const auto floats = [&](const gyre::Dims& shape) {
    return device_.tensor(gyre::DType::f32, shape);
  };
  const gyre::Dims hidden = {tokens, config_.hidden}, inner = {tokens, config_.intermediate};
  const gyre::Dims q = {tokens, config_.heads, config_.head_dim};
  const gyre::Dims kv = {tokens, config_.kv_heads, config_.head_dim};
  return {.hidden = floats(hidden),
          .normed = floats(hidden),
          .q = floats(q),
          .k = floats(kv),
          .v = floats(kv),
          .out = floats(q),
          .gate = floats(inner),
          .up = floats(inner),
          .logits = floats({config_.vocabulary})};
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

// What differs from step to step: the tokens' embeddings, and where the sequence is.
void Model::begin(std::span<const int32_t> tokens, const Step& step) {
  Rows hidden(static_cast<Eigen::Index>(tokens.size()), weights_.embedding.cols());
  for (size_t i = 0; i < tokens.size(); ++i) {
    hidden.row(static_cast<Eigen::Index>(i)) = weights_.embedding.row(tokens[i]);
  }
  step.hidden.write_from(std::span<const float>(hidden.data(), static_cast<size_t>(hidden.size())));
  cache_.begin_step(encoder_, tokens.size());
  encoder_.submit().wait();
}

// A whole step. Which of its commands wait for which, Gyre finds out.
void Model::record(const Step& step) {
  for (size_t layer = 0; layer < weights_.layers.size(); ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    kernels_.norm(encoder_, step.hidden, w.input_norm, config_.epsilon, step.normed);
    kernels_.linear(encoder_, step.normed, w.q, step.q);
    kernels_.linear(encoder_, step.normed, w.k, step.k);
    kernels_.linear(encoder_, step.normed, w.v, step.v);
    record_attention(layer, step);
    kernels_.linear(encoder_, step.out, w.o, step.hidden, true);

    kernels_.norm(encoder_, step.hidden, w.post_attention_norm, config_.epsilon, step.normed);
    kernels_.linear(encoder_, step.normed, w.gate, step.gate);
    kernels_.linear(encoder_, step.normed, w.up, step.up);
    kernels_.swiglu(encoder_, step.gate, step.up);
    kernels_.linear(encoder_, step.gate, w.down, step.hidden, true);
  }
  const uint64_t last = step.hidden.shape(0) - 1;
  const gyre::Tensor hidden = step.hidden.slice(0, last, 1), normed = step.normed.slice(0, last, 1);
  kernels_.norm(encoder_, hidden, weights_.norm, config_.epsilon, normed);
  kernels_.linear(encoder_, normed, weights_.output, step.logits);
}

RowVector Model::logits(const Step& step) const {
  RowVector values(static_cast<Eigen::Index>(step.logits.elements()));
  step.logits.read_to(std::span<float>(values.data(), static_cast<size_t>(values.size())));
  return values;
}

RowVector Model::prefill(std::span<const int32_t> tokens) {
  check(tokens);
  Step step;
  while (!tokens.empty()) {
    const auto part = tokens.first(std::min<size_t>(tokens.size(), cache_.options().step_tokens));
    tokens = tokens.subspan(part.size());
    step = make_step(part.size());
    begin(part, step);
    record(step);
    encoder_.submit().wait();
  }
  return logits(step);
}

RowVector Model::decode(int32_t token) {
  check({&token, 1});
  begin({&token, 1}, decode_step_);
  // The graph reads where the sequence is from device memory: it serves every later token.
  if (!decode_graph_) {
    record(decode_step_);
    decode_graph_ = encoder_.instantiate();
  }
  decode_graph_->replay().wait();
  return logits(decode_step_);
}

}  // namespace tiny_model
