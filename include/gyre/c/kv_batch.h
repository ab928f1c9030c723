#pragma once

#include "gyre/c/attention.h"
#include "gyre/c/base.h"
#include "gyre/c/kv_cache.h"
#include "gyre/c/rope_append.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_kv_batch_options {
  uint64_t size;
  uint64_t max_sequences;     // 0: 64
  uint64_t max_tokens;        // 0: 512
  uint64_t max_query_length;  // 0: max_tokens
  uint64_t max_kv_length;     // 0: all that the pool holds
} gyre_kv_batch_options;

typedef struct gyre_kv_step {
  uint64_t size;
  gyre_kv_sequence* sequence;
  uint64_t tokens;
  int32_t is_prefill;
  int32_t reserved;
} gyre_kv_step;

GYRE_API gyre_status gyre_kv_batch_create(const gyre_kv_pool* pool,
                                          const gyre_kv_batch_options* options,
                                          gyre_kv_batch** batch);
GYRE_API void gyre_kv_batch_destroy(gyre_kv_batch* batch);
GYRE_API gyre_status gyre_kv_batch_begin_step(gyre_kv_batch* batch, gyre_encoder* encoder,
                                              const gyre_kv_step* steps, uint64_t count);
GYRE_API gyre_status gyre_kv_batch_tokens(const gyre_kv_batch* batch, uint64_t* rows);
GYRE_API gyre_status gyre_kv_batch_positions(const gyre_kv_batch* batch, uint64_t rows,
                                             gyre_tensor** positions);
GYRE_API gyre_status gyre_kv_batch_append(gyre_kv_batch* batch, gyre_encoder* encoder,
                                          uint64_t layer, const gyre_tensor* k,
                                          const gyre_tensor* v);
GYRE_API gyre_status gyre_kv_batch_rope_append(gyre_kv_batch* batch, gyre_encoder* encoder,
                                               uint64_t layer,
                                               const gyre_rope_append_inputs* inputs,
                                               const gyre_rope_append_options* options);
GYRE_API gyre_status gyre_kv_batch_attend(const gyre_kv_batch* batch, gyre_encoder* encoder,
                                          uint64_t layer, const gyre_attend_inputs* inputs,
                                          const gyre_attend_options* options);
GYRE_API gyre_status gyre_kv_batch_record(gyre_kv_batch* batch);
GYRE_API gyre_status gyre_kv_batch_end_step(gyre_kv_batch* batch, gyre_step_end how);
GYRE_API gyre_status gyre_kv_batch_rollback(gyre_kv_batch* batch);

#ifdef __cplusplus
}
#endif
