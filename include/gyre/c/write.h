#pragma once

#include "gyre/c/base.h"
#include "gyre/c/calibration.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t gyre_cache_kind;
enum { GYRE_LINEAR = 0, GYRE_RING = 1 };

typedef struct gyre_kv_range {
  uint64_t size;
  uint64_t position;
  uint64_t source_begin;
  uint64_t tokens;  // if has_tokens, else all from source_begin
  int32_t has_tokens;
  gyre_cache_kind cache;
} gyre_kv_range;

typedef struct gyre_kv_copy_inputs {
  uint64_t size;
  const gyre_tensor* k;
  const gyre_tensor* k_cache;
  const gyre_tensor* v;
  const gyre_tensor* v_cache;
} gyre_kv_copy_inputs;

GYRE_API gyre_status gyre_kv_copy(gyre_encoder* encoder, const gyre_kv_copy_inputs* inputs,
                                  const gyre_kv_range* options);

GYRE_API gyre_status gyre_supports_kv_copy(const gyre_device* device, gyre_dtype source,
                                           gyre_dtype cache, int32_t* supported);

typedef struct gyre_kv_write_inputs {
  uint64_t size;
  const gyre_tensor* k;
  const gyre_tensor* v;
  const gyre_kv_pages* pages;
  const gyre_tensor* slots;
  const gyre_kv_calibration* k_calibration;
  const gyre_kv_calibration* v_calibration;
} gyre_kv_write_inputs;

GYRE_API gyre_status gyre_kv_write(gyre_encoder* encoder, const gyre_kv_write_inputs* inputs);

#ifdef __cplusplus
}
#endif
