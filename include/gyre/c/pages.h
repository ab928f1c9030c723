#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

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
