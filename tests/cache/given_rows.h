#pragma once
// K and V of every layer as they were given, and attention over them in double precision. A layer
// that shares a cache is answered from its owner's rows.

#include "attention/attention_fixture.h"
#include "gyre_test.h"

namespace gyre::test {

class GivenRows {
 public:
  explicit GivenRows(const std::vector<KvLayer>& layers, uint32_t seed = 3)
      : layers_(layers), k_(layers.size()), v_(layers.size()), random_(seed) {}

  // Rows of N(0,1), f32.
  Tensor fresh(const Device& device, const Dims& shape) {
    return normal_tensor(device, shape, random_);
  }
  Tensor k(const Device& device, uint64_t layer, uint64_t tokens) {
    const KvLayer& l = layers_[layer];
    return kept(fresh(device, {tokens, l.kv_heads, l.head_dim}), k_[layer]);
  }
  Tensor v(const Device& device, uint64_t layer, uint64_t tokens) {
    const KvLayer& l = layers_[layer];
    return kept(fresh(device, {tokens, l.kv_heads, l.v_head_dim}), v_[layer]);
  }
  void rollback(uint64_t tokens) {
    for (uint64_t i = 0; i < layers_.size(); ++i) {
      if (k_[i].empty()) continue;
      const KvLayer& l = layers_[i];
      k_[i].resize(k_[i].size() - tokens * l.kv_heads * l.head_dim);
      v_[i].resize(v_[i].size() - tokens * l.kv_heads * l.v_head_dim);
    }
  }

  // NMSE of what attention of q, the newest tokens, gave.
  double error(uint64_t layer, const Tensor& q, const Tensor& out) const {
    const KvLayer& l = layers_[layer];
    const uint64_t owner = l.kv_shared_layer_index.value_or(layer);
    reference::AttentionShape shape;
    shape.tokens = q.shape(0);
    shape.heads = q.shape(1);
    shape.kv_heads = l.kv_heads;
    shape.k_dim = l.head_dim;
    shape.v_dim = l.v_head_dim;
    shape.length = shape.capacity = k_[owner].size() / (l.kv_heads * l.head_dim);
    shape.window = l.window;
    shape.scale = 1 / std::sqrt(static_cast<double>(l.head_dim));
    const std::vector<float> queries = floats_of(q);
    const reference::AttentionData data{
        {queries.begin(), queries.end()}, k_[owner], v_[owner], {}, {}, {}};
    return nmse(floats_of(out), reference::attention(shape, data).out);
  }

 private:
  static Tensor kept(const Tensor& rows, std::vector<double>& all) {
    const std::vector<float> values = floats_of(rows);
    all.insert(all.end(), values.begin(), values.end());
    return rows;
  }

  std::vector<KvLayer> layers_;
  std::vector<std::vector<double>> k_, v_;
  std::mt19937 random_;
};

// Every shape and every kind of cache: heads from 1 to 5, the smallest and the largest head dims,
// and a layer that shares each.
inline std::vector<KvLayer> layers_that_differ() {
  using F = KvFormat;
  return {{.k = F::f32, .v = F::f32},
          {.k = F::tq8, .v = F::tq8, .tail = 9, .sink_tokens = 3, .kv_heads = 3, .head_dim = 24},
          {.k = F::f16, .v = F::f16, .window = 17, .kv_heads = 1, .head_dim = 256},
          {.kv_shared_layer_index = 0},
          {.k = F::tq8, .v = F::f16, .window = 30, .tail = 9, .head_dim = 512, .v_head_dim = 16},
          {.k = F::bf16, .v = F::tq8, .kv_heads = 5, .head_dim = 16, .v_head_dim = 1024},
          {.kv_shared_layer_index = 1},
          {.kv_shared_layer_index = 2},
          {.kv_shared_layer_index = 4},
          {.kv_shared_layer_index = 5}};
}

// NMSE that attention over N(0,1) rows of such a layer stays under: that of its coarser format.
inline double bound_of(const KvLayer& layer) {
  const auto of = [](KvFormat format) {
    return format == KvFormat::tq4   ? 1.5e-2
           : format == KvFormat::tq8 ? 1e-3
           : format == KvFormat::f32 ? 1e-10
                                     : 1e-4;
  };
  return std::max(of(layer.k), of(layer.v));
}

}  // namespace gyre::test
