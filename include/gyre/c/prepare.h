#pragma once

#include "gyre/c/base.h"
#include "gyre/c/kv_cache.h"
#include "gyre/c/rope.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_model_shape {
  uint64_t size;
  uint64_t heads;
  uint64_t kv_heads;  // of the layers that give none; so are the next two
  uint64_t head_dim;
  uint64_t v_head_dim;          // 0: head_dim
  const gyre_kv_layer* layers;  // NULL with layer_count 0: one, tail 128, sink_tokens 1
  uint64_t layer_count;
  uint64_t context;
  uint64_t step_tokens;           // 0: 512
  uint64_t page_tokens;           // 0: 64
  uint64_t max_sequences;         // 0: 64
  const gyre_rope_options* rope;  // NULL: the defaults, unless no_rope
  gyre_dtype dtype;               // 0: f16
  gyre_dtype out_dtype;           // 0: dtype
  int32_t no_rope;
  int32_t norm;
  int32_t tree_mask;
  int32_t no_cache;   // no KvCache will be used
  int32_t no_batch;   // no KvBatch will be used
  int32_t use_pages;  // kv_write and attention over pages that an engine owns
} gyre_model_shape;

typedef struct gyre_prepare_progress {
  uint64_t size;  // as the library has it
  uint64_t done;
  uint64_t all;
  const char* kernel;  // valid during the call
  double seconds;
  int32_t compiled;  // 0: it was in the kernel cache
  int32_t reserved;
} gyre_prepare_progress;

// `progress` may be NULL; it is called in this thread, after each kernel. `kernels`, which may be
// NULL, becomes how many the model needs.
GYRE_API gyre_status gyre_prepare(const gyre_device* device, const gyre_model_shape* shape,
                                  void (*progress)(const gyre_prepare_progress* so_far,
                                                   void* context),
                                  void* context, uint64_t* kernels);

#ifdef __cplusplus
}
#endif
