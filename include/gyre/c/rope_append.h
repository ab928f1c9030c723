#pragma once

#include "gyre/c/base.h"
#include "gyre/c/calibration.h"
#include "gyre/c/rope.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_rope_append_inputs {
  uint64_t size;
  const gyre_tensor* q;
  const gyre_tensor* q_out;
  const gyre_tensor* k;
  const gyre_tensor* v;
  const gyre_tensor* positions;
  const gyre_tensor* q_weight;
  const gyre_tensor* k_weight;
  const gyre_tensor* frequencies;
  const gyre_tensor* factors;
} gyre_rope_append_inputs;

typedef struct gyre_rope_append_options {
  uint64_t size;
  const gyre_rope_options* rope;  // NULL: the defaults, unless no_rope
  const gyre_rope_norm* norm;     // NULL: no norm
  int32_t no_rope;                // the norm alone, no positions
  int32_t reserved;
} gyre_rope_append_options;

// Where tokens go, as in gyre_kv_write_inputs.
typedef struct gyre_kv_slots {
  uint64_t size;
  const gyre_kv_pages* pages;
  const gyre_tensor* slots;
  const gyre_kv_calibration* k_calibration;
  const gyre_kv_calibration* v_calibration;
} gyre_kv_slots;

// Into pages; gyre_kv_cache_rope_append and gyre_kv_batch_rope_append do it for a cache or a batch.
GYRE_API gyre_status gyre_rope_append(gyre_encoder* encoder, const gyre_rope_append_inputs* inputs,
                                      const gyre_kv_slots* to,
                                      const gyre_rope_append_options* options);

#ifdef __cplusplus
}
#endif
