#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace gyre::bench {

// What a model's KV cache depends on.
struct ModelShape {
  std::string name;
  uint64_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  uint64_t window = 0;      // keys that window layers see; 0: there are none
  uint64_t full_every = 0;  // every so many-th layer sees all
  uint64_t rotary_dim = 0;  // not 0: latent attention, with a latent of head_dim and one KV head

  bool latent() const { return rotary_dim != 0; }
  uint64_t v_dim() const { return latent() ? rotary_dim : head_dim; }  // of what V stores
};

std::span<const ModelShape> model_shapes();
const ModelShape& model_shape(std::string_view name);  // refuses names that are none

// Throws gyre::Error for numbers that no model can have.
void check(const ModelShape& shape);

// How many layers see everything.
uint64_t full_layers(const ModelShape& shape);

}  // namespace gyre::bench
