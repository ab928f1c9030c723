#pragma once

#include "gyre/c/base.h"
#include "gyre/c/calibration.h"

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
// Dimensions of the two tensors; the rank, and so many entries of `dims`.
GYRE_API gyre_status gyre_kv_codes_shape(const gyre_kv_shape* shape, uint32_t* rank,
                                         uint64_t dims[6]);
GYRE_API gyre_status gyre_kv_scales_shape(const gyre_kv_shape* shape, uint32_t* rank,
                                          uint64_t dims[6]);

typedef struct gyre_kv_page_shape {
  uint64_t size;
  gyre_kv_format k;  // 0: tq8
  gyre_kv_format v;  // 0: tq4
  uint64_t kv_heads;
  uint64_t head_dim;
  uint64_t v_head_dim;     // 0: head_dim
  uint64_t page_tokens;    // 0: 64
  uint32_t signs_version;  // 0: the one this library has
  int32_t latent;          // not 0: k is the latent of MLA, v the rotary part of K
} gyre_kv_page_shape;

GYRE_API gyre_status gyre_kv_page_bytes(const gyre_kv_page_shape* shape, uint64_t* bytes);
GYRE_API gyre_status gyre_kv_pages_allocate(const gyre_device* device,
                                            const gyre_kv_page_shape* shape, uint64_t pages,
                                            gyre_kv_pages** made);
// From a tensor of the caller's: u8 [pages, kv_page_bytes].
GYRE_API gyre_status gyre_kv_pages_create(const gyre_kv_page_shape* shape, const gyre_tensor* bytes,
                                          gyre_kv_pages** made);
GYRE_API gyre_status gyre_kv_pages_bytes(const gyre_kv_pages* pages, gyre_tensor** tensor);
GYRE_API void gyre_kv_pages_destroy(gyre_kv_pages* pages);

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

typedef struct gyre_kv_page_copy_inputs {
  uint64_t size;
  const gyre_kv_pages* pages;
  const gyre_tensor* from;
  const gyre_tensor* to;
} gyre_kv_page_copy_inputs;

GYRE_API gyre_status gyre_kv_page_copy(gyre_encoder* encoder,
                                       const gyre_kv_page_copy_inputs* inputs);

#ifdef __cplusplus
}
#endif
