#include "gyre/c/kv_cache.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/scratch.h"
#include "gyre/c/snapshot.h"

namespace gyre::c_api {

KvLayer kv_layer(const gyre_kv_layer& given) {
  KvLayer made;
  made.k = kv_format_or(given.k, made.k, "layer.k");
  made.v = kv_format_or(given.v, made.v, "layer.v");
  made.window = given.window;
  made.tail = given.tail;
  made.sink_tokens = given.sink_tokens;
  made.kv_heads = given.kv_heads;
  made.head_dim = given.head_dim;
  made.v_head_dim = given.v_head_dim;
  made.latent = given.latent != 0;
  if (given.is_kv_shared_layer != 0) {
    made.kv_shared_layer_index = given.kv_shared_layer_index;
  } else if (given.kv_shared_layer_index != 0) {
    refuse("layer.kv_shared_layer_index is ", given.kv_shared_layer_index,
           ", and is_kv_shared_layer is 0");
  }
  return made;
}

std::vector<KvLayer> kv_layers(const gyre_kv_layer* layers, uint64_t count) {
  if (layers == nullptr && count == 0) return {kDefaultKvLayer};
  std::vector<KvLayer> made;
  for (const gyre_kv_layer& layer : read_array(layers, count, kKvMaxLayers, "layers"))
    made.push_back(kv_layer(layer));
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

namespace {

gyre::KvCache& value(gyre_kv_cache* cache) { return deref(cache, "cache").value; }
const gyre::KvCache& value(const gyre_kv_cache* cache) { return deref(cache, "cache").value; }

gyre::KvPolicy kv_policy(const gyre_kv_policy* policy) {
  const gyre_kv_policy given = read_or_default(policy, "policy");
  gyre::KvPolicy made;
  if (given.layer != nullptr) made.layer = kv_layer(read_or_default(given.layer, "policy.layer"));
  made.edge_layers = given.edge_layers;
  made.edge_format = kv_format_or(given.edge_format, made.edge_format, "policy.edge_format");
  made.window = given.window;
  made.full_every = given.full_every;
  made.window_format =
      kv_format_or(given.window_format, made.window_format, "policy.window_format");
  made.kv_shared_layers = given.kv_shared_layers;
  return made;
}

gyre::KvCacheOptions kv_cache_options(const gyre_kv_cache_options* options) {
  const gyre_kv_cache_options given = read(options, "options");
  gyre::KvCacheOptions made;
  made.kv_heads = given.kv_heads;
  made.head_dim = given.head_dim;
  made.v_head_dim = given.v_head_dim;
  made.capacity = given.capacity;
  made.layers = kv_layers(given.layers, given.layer_count);
  made.step_tokens = or_default(given.step_tokens, made.step_tokens);
  made.calibration = kv_calibrations(given.calibration, given.calibration_count);
  return made;
}

}  // namespace

gyre_status gyre_kv_layers(uint64_t count, const gyre_kv_policy* policy, gyre_kv_layer* layers) {
  return guard(__func__, [&] {
    const std::vector<gyre::KvLayer> made = gyre::kv_layers(count, kv_policy(policy));
    read_array(layers, count, count, "layers");  // nothing is written if a size is wrong
    for (uint64_t i = 0; i < count; ++i) {
      const gyre::KvLayer& layer = made[i];
      write(element(layers, i),
            {.size = 0,
             .k = from_kv_format(layer.k),
             .v = from_kv_format(layer.v),
             .window = layer.window,
             .tail = layer.tail,
             .sink_tokens = layer.sink_tokens,
             .kv_heads = layer.kv_heads,
             .head_dim = layer.head_dim,
             .v_head_dim = layer.v_head_dim,
             .kv_shared_layer_index = layer.kv_shared_layer_index.value_or(0),
             .is_kv_shared_layer = layer.kv_shared_layer_index.has_value(),
             .latent = layer.latent},
            "layers");
    }
  });
}

gyre_status gyre_kv_cache_create(const gyre_device* device, const gyre_kv_cache_options* options,
                                 gyre_kv_cache** cache) {
  return make(__func__, cache, "cache", [&] {
    return gyre::KvCache(deref(device, "device").value, kv_cache_options(options));
  });
}

void gyre_kv_cache_destroy(gyre_kv_cache* cache) { destroy(__func__, cache, "cache"); }

gyre_status gyre_kv_cache_length(const gyre_kv_cache* cache, uint64_t* tokens) {
  return answer(__func__, tokens, "tokens", [&] { return value(cache).length(); });
}

gyre_status gyre_kv_cache_bytes(const gyre_kv_cache* cache, uint64_t* bytes) {
  return answer(__func__, bytes, "bytes", [&] { return value(cache).bytes(); });
}

gyre_status gyre_kv_cache_layer_count(const gyre_kv_cache* cache, uint64_t* layers) {
  return answer(__func__, layers, "layers", [&] { return value(cache).options().layers.size(); });
}

gyre_status gyre_kv_cache_describe(gyre_kv_cache* cache, uint64_t layer, gyre_kv_layer_info* info) {
  return guard(__func__, [&] {
    const uint64_t layers = value(cache).options().layers.size();
    if (layer >= layers) refuse("there are ", layers, " layers, got layer ", layer);
    auto described = value(cache).describe();
    const gyre::KvLayerInfo d = described[layer];
    const gyre::KvLayerInfo& kept = cache->described.keep(std::move(described))[layer];
    write(info,
          {.size = 0,
           .k = from_kv_format(d.layer.k),
           .v = from_kv_format(d.layer.v),
           .window = d.layer.window,
           .tail = d.layer.tail,
           .sink_tokens = d.layer.sink_tokens,
           .slots = d.slots,
           .bytes = d.bytes,
           .kernel = kept.kernel.c_str(),
           .calibration = d.calibration,
           .kv_heads = d.layer.kv_heads,
           .head_dim = d.layer.head_dim,
           .v_head_dim = d.layer.v_head_dim,
           .kv_shared_layer_index = d.layer.kv_shared_layer_index.value_or(0),
           .is_kv_shared_layer = d.layer.kv_shared_layer_index.has_value(),
           .latent = d.layer.latent},
          "info");
  });
}

gyre_status gyre_kv_cache_begin_step(gyre_kv_cache* cache, gyre_encoder* encoder, uint64_t tokens) {
  return guard(__func__, [&] { value(cache).begin_step(value(encoder), tokens); });
}

gyre_status gyre_kv_cache_positions(const gyre_kv_cache* cache, uint64_t tokens,
                                    gyre_tensor** positions) {
  return make(__func__, positions, "positions", [&] { return value(cache).positions(tokens); });
}

gyre_status gyre_kv_cache_append(const gyre_kv_cache* cache, gyre_encoder* encoder, uint64_t layer,
                                 const gyre_tensor* k, const gyre_tensor* v) {
  return guard(__func__, [&] { value(cache).append(value(encoder), layer, tensor(k), tensor(v)); });
}

gyre_status gyre_kv_cache_rope_append(const gyre_kv_cache* cache, gyre_encoder* encoder,
                                      uint64_t layer, const gyre_rope_append_inputs* inputs,
                                      const gyre_rope_append_options* options) {
  return guard(__func__, [&] {
    value(cache).rope_append(value(encoder), layer, rope_append_inputs(inputs),
                             rope_append_options(options));
  });
}

gyre_status gyre_kv_cache_attend(const gyre_kv_cache* cache, gyre_encoder* encoder, uint64_t layer,
                                 const gyre_attend_inputs* inputs,
                                 const gyre_attend_options* options) {
  return guard(__func__, [&] {
    AttendCall call(inputs);
    value(cache).attend(value(encoder), layer, call.in, attend_options(options));
    call.scratch.give_back();
  });
}

gyre_status gyre_kv_cache_end_step(gyre_kv_cache* cache, gyre_step_end how) {
  return guard(__func__, [&] { value(cache).end_step(step_end(how)); });
}

gyre_status gyre_kv_cache_rollback(gyre_kv_cache* cache, gyre_encoder* encoder,
                                   uint64_t dropped_tokens) {
  return guard(__func__, [&] { value(cache).rollback(value(encoder), dropped_tokens); });
}

gyre_status gyre_kv_cache_clear(gyre_kv_cache* cache, gyre_encoder* encoder) {
  return guard(__func__, [&] { value(cache).clear(value(encoder)); });
}

gyre_status gyre_kv_cache_fork(const gyre_kv_cache* cache, gyre_encoder* encoder, uint64_t capacity,
                               gyre_kv_cache** fork) {
  return make(__func__, fork, "fork", [&] { return value(cache).fork(value(encoder), capacity); });
}

gyre_status gyre_kv_cache_save(const gyre_kv_cache* cache, const char* path) {
  return guard(__func__, [&] { value(cache).save(&deref(path, "path")); });
}

gyre_status gyre_kv_cache_load(gyre_kv_cache* cache, const char* path) {
  return guard(__func__, [&] { value(cache).load(&deref(path, "path")); });
}

gyre_status gyre_kv_snapshot_inspect(const char* path, gyre_kv_snapshot_info* info) {
  return guard(__func__, [&] {
    const gyre::KvSnapshotInfo found = gyre::inspect_snapshot(&deref(path, "path"));
    write(info,
          {.size = 0,
           .version = found.version,
           .kv_heads = found.options.kv_heads,
           .head_dim = found.options.head_dim,
           .v_head_dim = found.options.v_head_dim,
           .capacity = found.options.capacity,
           .layer_count = found.options.layers.size(),
           .step_tokens = found.options.step_tokens,
           .length = found.length,
           .file_bytes = found.file_bytes,
           .calibration = found.calibration},
          "info");
  });
}

gyre_status gyre_kv_snapshot_verify(const char* path) {
  return guard(__func__, [&] { gyre::verify_snapshot(&deref(path, "path")); });
}
