#pragma once

#include "gyre/c/attention.h"
#include "gyre/c/base.h"
#include "gyre/c/calibration.h"
#include "gyre/c/rope_append.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_kv_layer {
  uint64_t size;
  gyre_kv_format k;  // 0: tq8
  gyre_kv_format v;  // 0: tq4
  uint64_t window;
  uint64_t tail;
  uint64_t sink_tokens;
  uint64_t kv_heads;    // 0: the options'
  uint64_t head_dim;    // 0: the options'
  uint64_t v_head_dim;  // 0: head_dim where the layer gives one, otherwise the options'
  uint64_t kv_shared_layer_index;
  int32_t is_kv_shared_layer;  // it attends over the K and V of the layer kv_shared_layer_index
  int32_t latent;              // not 0: k is the latent of MLA, v the rotary part of K
} gyre_kv_layer;

typedef struct gyre_kv_policy {
  uint64_t size;
  const gyre_kv_layer* layer;  // NULL: tq8 and tq4, tail 128, sink_tokens 1
  uint64_t edge_layers;
  uint64_t window;
  uint64_t full_every;
  gyre_kv_format edge_format;    // 0: tq8
  gyre_kv_format window_format;  // 0: f16
  uint64_t kv_shared_layers;
} gyre_kv_policy;

// Writes `count` layers, whose sizes must be set.
GYRE_API gyre_status gyre_kv_layers(uint64_t count, const gyre_kv_policy* policy,
                                    gyre_kv_layer* layers);

typedef struct gyre_kv_cache_options {
  uint64_t size;
  uint64_t kv_heads;  // of the layers that give none; so are the next two
  uint64_t head_dim;
  uint64_t v_head_dim;  // 0: head_dim
  uint64_t capacity;
  const gyre_kv_layer* layers;  // NULL with layer_count 0: one, tail 128, sink_tokens 1
  uint64_t layer_count;
  uint64_t step_tokens;                    // 0: 512
  const gyre_kv_calibration* calibration;  // K and V of each layer, alternating; NULL: none
  uint64_t calibration_count;              // twice layer_count, or 0
} gyre_kv_cache_options;

// One thread at a time, replays included.
GYRE_API gyre_status gyre_kv_cache_create(const gyre_device* device,
                                          const gyre_kv_cache_options* options,
                                          gyre_kv_cache** cache);
GYRE_API void gyre_kv_cache_destroy(gyre_kv_cache* cache);

GYRE_API gyre_status gyre_kv_cache_length(const gyre_kv_cache* cache, uint64_t* tokens);
GYRE_API gyre_status gyre_kv_cache_bytes(const gyre_kv_cache* cache, uint64_t* bytes);

typedef struct gyre_kv_layer_info {
  uint64_t size;
  gyre_kv_format k;
  gyre_kv_format v;
  uint64_t window;
  uint64_t tail;
  uint64_t sink_tokens;
  uint64_t slots;
  uint64_t bytes;
  const char* kernel;    // lives as long as the cache's handle
  uint64_t calibration;  // a checksum; 0: none
  uint64_t kv_heads;
  uint64_t head_dim;
  uint64_t v_head_dim;
  uint64_t kv_shared_layer_index;
  int32_t is_kv_shared_layer;
  int32_t latent;
} gyre_kv_layer_info;

GYRE_API gyre_status gyre_kv_cache_layer_count(const gyre_kv_cache* cache, uint64_t* layers);
GYRE_API gyre_status gyre_kv_cache_describe(gyre_kv_cache* cache, uint64_t layer,
                                            gyre_kv_layer_info* info);

GYRE_API gyre_status gyre_kv_cache_begin_step(gyre_kv_cache* cache, gyre_encoder* encoder,
                                              uint64_t tokens);
GYRE_API gyre_status gyre_kv_cache_positions(const gyre_kv_cache* cache, uint64_t tokens,
                                             gyre_tensor** positions);
GYRE_API gyre_status gyre_kv_cache_append(const gyre_kv_cache* cache, gyre_encoder* encoder,
                                          uint64_t layer, const gyre_tensor* k,
                                          const gyre_tensor* v);
GYRE_API gyre_status gyre_kv_cache_rope_append(const gyre_kv_cache* cache, gyre_encoder* encoder,
                                               uint64_t layer,
                                               const gyre_rope_append_inputs* inputs,
                                               const gyre_rope_append_options* options);
GYRE_API gyre_status gyre_kv_cache_attend(const gyre_kv_cache* cache, gyre_encoder* encoder,
                                          uint64_t layer, const gyre_attend_inputs* inputs,
                                          const gyre_attend_options* options);
typedef int32_t gyre_step_end;
enum { GYRE_STEP_CHECKED = 0, GYRE_STEP_CAPTURED = 1 };

GYRE_API gyre_status gyre_kv_cache_end_step(gyre_kv_cache* cache, gyre_step_end how);
GYRE_API gyre_status gyre_kv_cache_rollback(gyre_kv_cache* cache, gyre_encoder* encoder,
                                            uint64_t dropped_tokens);
GYRE_API gyre_status gyre_kv_cache_clear(gyre_kv_cache* cache, gyre_encoder* encoder);
// capacity: 0 is the cache's own.
GYRE_API gyre_status gyre_kv_cache_fork(const gyre_kv_cache* cache, gyre_encoder* encoder,
                                        uint64_t capacity, gyre_kv_cache** fork);
GYRE_API gyre_status gyre_kv_cache_save(const gyre_kv_cache* cache, const char* path);
GYRE_API gyre_status gyre_kv_cache_load(gyre_kv_cache* cache, const char* path);

#ifdef __cplusplus
}
#endif
