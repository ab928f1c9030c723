#pragma once
// The layers of a cache or pool with every number filled in. Everything inside reads these; what
// the options leave out is resolved here and nowhere else.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gyre/kv_cache.h"

namespace gyre {

// What the rows of a layer's K and V have.
struct LayerShape {
  uint64_t kv_heads = 0;
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;

  bool operator==(const LayerShape&) const = default;
};

inline LayerShape shape_of(const KvLayer& layer) {
  return {layer.kv_heads, layer.head_dim, layer.v_head_dim};
}
// The numbers that all layers have; 0 where they differ.
LayerShape common_shape(std::span<const KvLayer> layers);

inline bool shares_kv(const KvLayer& layer) { return layer.kv_shared_layer_index.has_value(); }
// The layer whose cache this one reads: its own number, unless it shares another's.
inline uint64_t owner_of(std::span<const KvLayer> layers, uint64_t index) {
  return layers[index].kv_shared_layer_index.value_or(index);
}
// What files say about a layer in one number: the layer whose cache it reads, and in the top bit
// whether that is latent.
constexpr uint64_t kLatentBit = uint64_t{1} << 63;
inline uint64_t owner_field(std::span<const KvLayer> layers, uint64_t index) {
  return owner_of(layers, index) | (layers[index].latent ? kLatentBit : 0);
}
// Refuses an append to a layer that has no cache of its own.
void require_own_kv(const char* op, std::span<const KvLayer> layers, uint64_t index);

// Refuses layers that neither a cache nor a pool can have. `op` opens the messages. Resolved layers
// stay as they are.
std::vector<KvLayer> resolve_layers(const char* op, const LayerShape& options,
                                    const std::vector<KvLayer>& layers);
template <class Options>
std::vector<KvLayer> resolve_layers(const char* op, const Options& options) {
  return resolve_layers(op, {options.kv_heads, options.head_dim, options.v_head_dim},
                        options.layers);
}

}  // namespace gyre
