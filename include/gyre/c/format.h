#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t gyre_kv_role;
enum { GYRE_KV_ROLE_K = 0, GYRE_KV_ROLE_V = 1 };

typedef struct gyre_kv_shape {
  uint64_t size;
  gyre_kv_format format;  // 0: f16
  gyre_kv_role role;
  uint64_t kv_heads;
  uint64_t capacity;  // slots
  uint64_t head_dim;
  uint32_t signs_version;  // 0: the one this library has
  float scale_factor;      // 0: 1
} gyre_kv_shape;

GYRE_API gyre_status gyre_kv_buffer_allocate(const gyre_device* device, const gyre_kv_shape* shape,
                                             gyre_kv_buffer** buffer);
// From tensors of the caller's; `scales` is NULL for dense formats. Ops check whether they fit.
GYRE_API gyre_status gyre_kv_buffer_create(const gyre_kv_shape* shape, const gyre_tensor* codes,
                                           const gyre_tensor* scales, gyre_kv_buffer** buffer);
// New handles of the buffer's tensors. `tensor` becomes NULL where there are no scales.
GYRE_API gyre_status gyre_kv_buffer_codes(const gyre_kv_buffer* buffer, gyre_tensor** tensor);
GYRE_API gyre_status gyre_kv_buffer_scales(const gyre_kv_buffer* buffer, gyre_tensor** tensor);
GYRE_API void gyre_kv_buffer_destroy(gyre_kv_buffer* buffer);
// Dimensions of the two tensors; the rank, and that many entries of `dims`.
GYRE_API gyre_status gyre_kv_codes_shape(const gyre_kv_shape* shape, uint32_t* rank,
                                         uint64_t dims[6]);
GYRE_API gyre_status gyre_kv_scales_shape(const gyre_kv_shape* shape, uint32_t* rank,
                                          uint64_t dims[6]);

#ifdef __cplusplus
}
#endif
