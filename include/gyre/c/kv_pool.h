#pragma once

#include "gyre/c/base.h"
#include "gyre/c/calibration.h"
#include "gyre/c/kv_cache.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_kv_pool_options {
  uint64_t size;
  uint64_t kv_heads;  // of the layers that give none; so are the next two
  uint64_t head_dim;
  uint64_t v_head_dim;          // 0: head_dim
  const gyre_kv_layer* layers;  // NULL with layer_count 0: one, tail 128, sink_tokens 1
  uint64_t layer_count;
  uint64_t pages;
  uint64_t page_tokens;                    // 0: 64
  uint64_t sequences;                      // 0: 64
  uint64_t step_tokens;                    // 0: 512
  const gyre_kv_calibration* calibration;  // as in gyre_kv_cache_options
  uint64_t calibration_count;
} gyre_kv_pool_options;

// One thread at a time, its sequences and batches included; the memory lives until the last of
// these handles is destroyed.
GYRE_API gyre_status gyre_kv_pool_create(const gyre_device* device,
                                         const gyre_kv_pool_options* options, gyre_kv_pool** pool);
GYRE_API void gyre_kv_pool_destroy(gyre_kv_pool* pool);

typedef struct gyre_kv_pool_info {
  uint64_t size;
  uint64_t group_count;
  uint64_t bytes;
  uint64_t used_bytes;
  uint64_t sequences;
  uint64_t prefixes;
  uint64_t evictions;
  uint64_t calibration;  // which calibration its pages are written with; 0: none
} gyre_kv_pool_info;

typedef struct gyre_kv_group_info {
  uint64_t size;
  const char* name;  // this and `layers` live as long as the pool's handle
  const uint64_t* layers;
  uint64_t layer_count;
  uint64_t page_bytes;
  uint64_t pages;
  uint64_t used;
  uint64_t shared;
  uint64_t cached;
  uint64_t free;
} gyre_kv_group_info;

GYRE_API gyre_status gyre_kv_pool_describe(const gyre_kv_pool* pool, gyre_kv_pool_info* info);
GYRE_API gyre_status gyre_kv_pool_describe_group(gyre_kv_pool* pool, uint64_t group,
                                                 gyre_kv_group_info* info);

GYRE_API gyre_status gyre_kv_pool_sequence(const gyre_kv_pool* pool, gyre_kv_sequence** sequence);
// `tokens` may be NULL where count is 0.
GYRE_API gyre_status gyre_kv_pool_publish(const gyre_kv_pool* pool,
                                          const gyre_kv_sequence* sequence, const int32_t* tokens,
                                          uint64_t count);
GYRE_API gyre_status gyre_kv_pool_match(const gyre_kv_pool* pool, const int32_t* tokens,
                                        uint64_t count, gyre_kv_sequence** sequence);
GYRE_API gyre_status gyre_kv_pool_forget(const gyre_kv_pool* pool);
GYRE_API gyre_status gyre_kv_pool_export_page(const gyre_kv_pool* pool,
                                              const gyre_kv_sequence* sequence, uint64_t page,
                                              gyre_bytes** bytes);
GYRE_API gyre_status gyre_kv_pool_import_page(const gyre_kv_pool* pool, gyre_kv_sequence* sequence,
                                              const void* data, uint64_t bytes);
GYRE_API gyre_status gyre_kv_pool_save(const gyre_kv_pool* pool, const gyre_kv_sequence* sequence,
                                       const char* path);
GYRE_API gyre_status gyre_kv_pool_load(const gyre_kv_pool* pool, const char* path,
                                       gyre_kv_sequence** sequence);
GYRE_API gyre_status gyre_kv_pool_save_prefixes(const gyre_kv_pool* pool, const char* path);
GYRE_API gyre_status gyre_kv_pool_load_prefixes(const gyre_kv_pool* pool, const char* path,
                                                uint64_t* pages);

GYRE_API void gyre_kv_sequence_destroy(gyre_kv_sequence* sequence);
GYRE_API gyre_status gyre_kv_sequence_length(const gyre_kv_sequence* sequence, uint64_t* tokens);
GYRE_API gyre_status gyre_kv_sequence_fork(const gyre_kv_sequence* sequence,
                                           gyre_kv_sequence** fork);
GYRE_API gyre_status gyre_kv_sequence_rollback(gyre_kv_sequence* sequence, uint64_t dropped_tokens);
GYRE_API gyre_status gyre_kv_sequence_clear(gyre_kv_sequence* sequence);

#ifdef __cplusplus
}
#endif
