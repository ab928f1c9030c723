// From the fields of a config.json to rope and norm_rope. docs/model_config.md quotes this file.
#include <gyre/gyre.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <span>

namespace {

constexpr uint64_t kTokens = 2, kHeads = 8, kKvHeads = 2, kHeadDim = 128;

// Both tokens hold the same values, and stand at positions 5 and 100005.
gyre::Tensor heads(const gyre::Device& device, uint64_t count) {
  gyre::Tensor tensor = device.tensor(gyre::DType::f32, {kTokens, count, kHeadDim});
  const auto values = tensor.data<float>();
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i % (values.size() / kTokens)));
  }
  return tensor;
}

gyre::Tensor positions_of_tokens(const gyre::Device& device) {
  gyre::Tensor positions = device.tensor(gyre::DType::i32, {kTokens});
  positions.data<int32_t>()[0] = 5;
  positions.data<int32_t>()[1] = 100005;
  return positions;
}

gyre::Tensor vector_of(const gyre::Device& device, uint64_t size, float value) {
  gyre::Tensor tensor = device.tensor(gyre::DType::f32, {size});
  std::ranges::fill(tensor.data<float>(), value);
  return tensor;
}

// The first head of a token.
std::span<const float> head(const gyre::Tensor& tensor, uint64_t token) {
  return tensor.data<const float>().subspan(token * tensor.stride(0), kHeadDim);
}

double dot(std::span<const float> a, std::span<const float> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Prints the root mean square of a head after its norm, and q k of each token: both are at the same
// position, so the rotation must not change it.
void print(const char* name, const gyre::Tensor& q, const gyre::Tensor& k) {
  const std::span<const float> first = head(q, 0);
  std::cout << name << ": root mean square " << std::sqrt(dot(first, first) / kHeadDim)
            << ", q k at 5 " << dot(first, head(k, 0)) << ", at 100005 "
            << dot(head(q, 1), head(k, 1)) << '\n';
}

void qwen3_with_yarn(const gyre::Device& device) {
  const gyre::Tensor q = heads(device, kHeads), k = heads(device, kKvHeads);
  const gyre::Tensor positions = positions_of_tokens(device);
  const gyre::Tensor q_norm = vector_of(device, kHeadDim, 1),
                     k_norm = vector_of(device, kHeadDim, 1);
  gyre::Encoder encoder(device);

  // "rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128, "rope_scaling":
  // {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
  const gyre::RopeFrequencies yarn =
      gyre::rope_frequencies({.rope_theta = 1e6,
                              .rotary_dim = 128,
                              .rope_type = gyre::RopeType::yarn,
                              .factor = 4,
                              .original_max_position_embeddings = 32768});
  const gyre::Tensor table = gyre::rope_table(device, yarn.inverse);  // once per model

  gyre::norm_rope(
      encoder,
      {.x = q,
       .positions = positions,  // i32 [tokens]; of a cache: cache.positions(tokens)
       .out = q,
       .weight = q_norm,
       .k = k,
       .k_out = k,
       .k_weight = k_norm,
       .frequencies = table},
      {.rope = gyre::RopeOptions{.magnitude = static_cast<float>(yarn.attention_factor)},
       .epsilon = 1e-6f});

  encoder.submit().wait();
  print("norm_rope with yarn", q, k);
}

void phi3_with_longrope(const gyre::Device& device) {
  const gyre::Tensor q = heads(device, kHeads), k = heads(device, kKvHeads);
  const gyre::Tensor positions = positions_of_tokens(device);
  const gyre::Tensor factors = vector_of(device, 48, 1.5f);
  gyre::Encoder encoder(device);

  // "partial_rotary_factor": 0.75, "rope_scaling": {"rope_type": "longrope", "long_factor": [...]},
  // "max_position_embeddings": 131072, "original_max_position_embeddings": 4096
  const double magnitude = std::sqrt(1 + std::log(131072.0 / 4096) / std::log(4096.0));
  gyre::rope(encoder,
             {.x = q,
              .positions = positions,
              .out = q,
              .k = k,
              .k_out = k,
              .factors = factors},  // f32 [48]: long_factor, beyond 4096 tokens; else short_factor
             {.rotary_dim = 96, .base = 10000, .magnitude = static_cast<float>(magnitude)});

  encoder.submit().wait();
  print("rope with longrope", q, k);
}

}  // namespace

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  qwen3_with_yarn(device);
  phi3_with_longrope(device);
}
