#include "cache/layers.h"

#include "ops/attention_latent.h"
#include "ops/kv_layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

bool is_compressed(const KvLayer& layer) {
  return describe(layer.k).compressed || describe(layer.v).compressed;
}

uint64_t first_given(uint64_t value, uint64_t otherwise) { return value != 0 ? value : otherwise; }

KvLayer with_shape(const LayerShape& options, KvLayer layer) {
  // A layer with a head_dim of its own does not take V's from the options.
  const uint64_t otherwise = first_given(layer.head_dim, options.v_head_dim);
  layer.kv_heads = first_given(layer.kv_heads, options.kv_heads);
  layer.head_dim = first_given(layer.head_dim, options.head_dim);
  layer.v_head_dim = first_given(layer.v_head_dim, first_given(otherwise, layer.head_dim));
  return layer;
}

// The owner decides what is stored. The layer may repeat its numbers, not change them.
KvLayer with_owner(const std::string& where, const std::vector<KvLayer>& resolved,
                   const KvLayer& layer) {
  const uint64_t index = *layer.kv_shared_layer_index;
  require(index < resolved.size(), where, " can share the cache of an earlier layer, got layer ",
          index);
  KvLayer owner = resolved[index];
  require(!shares_kv(owner), where, " shares the cache of layer ", index,
          ", which has none of its own and shares that of layer ",
          owner.kv_shared_layer_index.value_or(0));
  const auto same = [&](const char* what, const auto& given, const auto& left_out,
                        const auto& owners, const auto& text) {
    require(given == left_out || given == owners, where, " shares the cache of layer ", index,
            ", whose ", what, " is ", text(owners), ", got ", text(given));
  };
  const auto number = [](uint64_t value) { return value; };
  const auto format = [](KvFormat value) { return name(value); };
  const KvLayer left_out;
  same("k", layer.k, left_out.k, owner.k, format);
  same("v", layer.v, left_out.v, owner.v, format);
  same("window", layer.window, left_out.window, owner.window, number);
  same("tail", layer.tail, left_out.tail, owner.tail, number);
  same("sink_tokens", layer.sink_tokens, left_out.sink_tokens, owner.sink_tokens, number);
  same("kv_heads", layer.kv_heads, left_out.kv_heads, owner.kv_heads, number);
  same("head_dim", layer.head_dim, left_out.head_dim, owner.head_dim, number);
  same("v_head_dim", layer.v_head_dim, left_out.v_head_dim, owner.v_head_dim, number);
  same("latent", layer.latent, left_out.latent, owner.latent, number);
  owner.kv_shared_layer_index = index;
  return owner;
}

void check_layer(const std::string& where, const KvLayer& layer) {
  require(layer.kv_heads != 0, where, ": kv_heads must be given");
  const auto check_dim = [&](const char* what, uint64_t dim) {
    require(dim >= 16 && dim % 8 == 0, where, ": ", what, " must be a multiple of 8 from 16, got ",
            dim);
  };
  check_dim("head_dim", layer.head_dim);
  check_dim("v_head_dim", layer.v_head_dim);
  check_kv_shape(where.c_str(), {layer.k, KvRole::k, layer.kv_heads, 0, layer.head_dim});
  check_kv_shape(where.c_str(), {layer.v, KvRole::v, layer.kv_heads, 0, layer.v_head_dim});
  if (layer.latent)
    check_latent_shape(where.c_str(),
                       {layer.k, layer.v, layer.kv_heads, layer.head_dim, layer.v_head_dim});
  require(is_compressed(layer) || (layer.tail == 0 && layer.sink_tokens == 0), where,
          " is not compressed, a 16-bit tail of ", layer.tail, " and sink_tokens of ",
          layer.sink_tokens, " would keep nothing better");
  require(layer.sink_tokens == 0 || layer.window == 0, where, " has a window of ", layer.window,
          " keys and ", layer.sink_tokens,
          " sink_tokens: only a layer that sees all keys can keep sink tokens");
}

// The newest layers take the cache of the last layer before them that sees as many keys.
void share_last(std::vector<KvLayer>& layers, uint64_t shared) {
  require(shared < layers.size(), "kv_layers: kv_shared_layers must be fewer than the ",
          layers.size(), " layers, got ", shared);
  const uint64_t own = layers.size() - shared;
  for (uint64_t i = own; i < layers.size(); ++i) {
    uint64_t owner = own;
    while (owner != 0 && layers[owner - 1].window != layers[i].window) --owner;
    require(owner != 0, "kv_layers: layer ", i, " with a window of ", layers[i].window,
            " cannot share: none of the first ", own, " layers has that window");
    layers[i] = layers[owner - 1];
    layers[i].kv_shared_layer_index = owner - 1;
  }
}

}  // namespace

LayerShape common_shape(std::span<const KvLayer> layers) {
  LayerShape common = shape_of(layers[0]);
  const auto keep_common = [](uint64_t& value, uint64_t other) {
    value = value == other ? value : 0;
  };
  for (const KvLayer& layer : layers) {
    keep_common(common.kv_heads, layer.kv_heads);
    keep_common(common.head_dim, layer.head_dim);
    keep_common(common.v_head_dim, layer.v_head_dim);
  }
  return common;
}

void require_own_kv(const char* op, std::span<const KvLayer> layers, uint64_t index) {
  require(!shares_kv(layers[index]), op, ": layer ", index,
          " has no K and V of its own, it shares the cache of layer ", owner_of(layers, index));
}

std::vector<KvLayer> resolve_layers(const char* op, const LayerShape& options,
                                    const std::vector<KvLayer>& layers) {
  require(!layers.empty() && layers.size() <= kKvMaxLayers, op, ": from 1 to ", kKvMaxLayers,
          " layers, got ", layers.size());
  std::vector<KvLayer> resolved;
  for (const KvLayer& layer : layers) {
    const std::string where = join(op, ": layer ", resolved.size());
    resolved.push_back(shares_kv(layer) ? with_owner(where, resolved, layer)
                                        : with_shape(options, layer));
    check_layer(where, resolved.back());
  }
  return resolved;
}

std::vector<KvLayer> kv_layers(uint64_t count, const KvPolicy& policy) try {
  require(count != 0 && count <= kKvMaxLayers, "kv_layers: from 1 to ", kKvMaxLayers,
          " layers, got ", count);
  require((policy.window == 0) == (policy.full_every == 0),
          "kv_layers: window and full_every go together, got ", policy.window, " and ",
          policy.full_every);
  std::vector<KvLayer> layers(count, policy.layer);
  for (uint64_t i = 0; i < count; ++i) {
    if (policy.full_every != 0 && (i + 1) % policy.full_every != 0) {
      layers[i] = {.k = policy.window_format, .v = policy.window_format, .window = policy.window};
    } else if (i < policy.edge_layers || count - 1 - i < policy.edge_layers) {
      layers[i].k = layers[i].v = policy.edge_format;
    }
    if (!is_compressed(layers[i])) layers[i].tail = layers[i].sink_tokens = 0;
  }
  share_last(layers, policy.kv_shared_layers);
  return layers;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_layers");
}

}  // namespace gyre
