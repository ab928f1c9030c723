// A model whose layers differ, as Gemma 4's do: window layers of head_dim 256, full layers of 512
// with fewer KV heads, and last layers that attend over the K and V of earlier ones.
// docs/model_config.md quotes this file.
#include <gyre/gyre.h>

#include <cmath>
#include <iostream>
#include <vector>

namespace {

constexpr uint64_t kLayers = 12, kHeads = 8, kTokens = 40;

// Stands in for a layer's projections.
gyre::Tensor projected(const gyre::Device& device, uint64_t heads, uint64_t dim) {
  gyre::Tensor rows = device.tensor(gyre::DType::f32, {kTokens, heads, dim});
  const auto values = rows.data<float>();
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  return rows;
}

gyre::RopeOptions rope_of(const gyre::KvLayer& layer) {
  if (layer.window != 0) return {.base = 10000};
  // "rope_type": "proportional", "partial_rotary_factor": 0.25
  return {.rotary_dim = static_cast<uint32_t>(layer.head_dim / 4),
          .partner = gyre::RopeSpan::head_dim,
          .exponent = gyre::RopeSpan::head_dim,
          .base = 1e6};
}

void record_layer(gyre::Encoder& encoder, const gyre::KvCache& cache, uint64_t index) {
  const gyre::Device device = encoder.device();
  const gyre::KvLayer& layer = cache.layers()[index];
  const gyre::Tensor q = projected(device, kHeads, layer.head_dim);
  const gyre::Tensor out = device.tensor(gyre::DType::f32, {kTokens, kHeads, layer.v_head_dim});
  if (layer.kv_shared_layer_index) {  // no K and V: q alone is rotated
    gyre::rope(encoder, {.x = q, .positions = cache.positions(kTokens), .out = q}, rope_of(layer));
  } else {
    const gyre::Tensor k = projected(device, layer.kv_heads, layer.head_dim);
    const gyre::Tensor v = projected(device, layer.kv_heads, layer.v_head_dim);
    cache.rope_append(encoder, index, {.q = q, .q_out = q, .k = k, .v = v},
                      {.rope = rope_of(layer)});
  }
  cache.attend(encoder, index, {.q = q, .out = out}, {.scale = 1.0f});
}

}  // namespace

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  // "num_hidden_layers": 12, "num_kv_shared_layers": 5, "sliding_window": 1024,
  // "num_key_value_heads": 4, "head_dim": 256,
  // "num_global_key_value_heads": 1, "global_head_dim": 512
  const std::vector<gyre::KvLayer> layers =
      gyre::kv_layers(12, {.layer = {.kv_heads = 1, .head_dim = 512},  // full layers
                           .window = 1024,
                           .full_every = 6,
                           .kv_shared_layers = 5});
  gyre::KvCache cache(device, {.kv_heads = 4,  // of the layers that give none: the windows
                               .head_dim = 256,
                               .capacity = 8192,
                               .layers = layers});
  gyre::Encoder encoder(device);
  cache.begin_step(encoder, kTokens);
  for (uint64_t i = 0; i < kLayers; ++i) record_layer(encoder, cache, i);
  encoder.submit().wait();
  uint64_t index = 0;
  for (const gyre::KvLayerInfo& row : cache.describe()) {
    std::cout << "layer " << index++ << ": " << row.layer.kv_heads << " x " << row.layer.head_dim;
    if (row.layer.kv_shared_layer_index) {
      std::cout << ", the cache of layer " << *row.layer.kv_shared_layer_index << "\n";
    } else {
      std::cout << ", " << row.slots << " slots, " << row.bytes / 1024 << " KiB\n";
    }
  }
  std::cout << cache.length() << " tokens, " << (cache.bytes() >> 20) << " MiB\n";
}
