#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// Which keys a query sees, and what happens to its logits before the softmax. A NULL mask is
// causal.
typedef struct gyre_attention_mask {
  uint64_t size;
  uint64_t window;
  float soft_cap;
  int32_t not_causal;
  const gyre_tensor* alibi_slopes;
  const gyre_tensor* tree_mask;
  const gyre_tensor* sink_logits;
} gyre_attention_mask;

typedef struct gyre_attention_inputs {
  uint64_t size;
  const gyre_tensor* q;
  const gyre_kv_buffer* k_cache;
  const gyre_kv_buffer* v_cache;
  const gyre_tensor* out;
  const gyre_tensor* lse;
  int32_t latent;  // not 0: k_cache is the latent of MLA, v_cache the rotary part of K
  int32_t reserved;
  // *scratch is NULL, or what an earlier call made of it and nobody else wrote to. Where the memory
  // must grow, the call destroys the handle and puts a new one in its place: keep one pointer to
  // it. Calls that share it run one after the other, those over latent rows and others have one
  // each. A call that finds it large enough allocates nothing. NULL: each call takes its own
  // memory, and on CUDA a long prompt over levels is slower.
  gyre_tensor** scratch;
} gyre_attention_inputs;

typedef struct gyre_attention_options {
  uint64_t size;
  uint64_t length;
  uint64_t ring_start;
  const gyre_attention_mask* mask;
  float scale;  // 0: 1 / sqrt(head_dim); latent attention has no default
  int32_t reserved;
} gyre_attention_options;

GYRE_API gyre_status gyre_attention(gyre_encoder* encoder, const gyre_attention_inputs* inputs,
                                    const gyre_attention_options* options);

typedef struct gyre_paged_attention_inputs {
  uint64_t size;
  const gyre_tensor* q;
  const gyre_kv_pages* pages;
  const gyre_tensor* page_table;
  const gyre_tensor* kv_lengths;
  const gyre_tensor* cu_seqlens_q;
  const gyre_tensor* is_prefill;
  const gyre_tensor* out;
  const gyre_tensor* lse;
  // As in gyre_attention_inputs; both may use the same. A call that finds it large enough can be
  // captured.
  gyre_tensor** scratch;
  const gyre_tensor* schedule;  // gyre_attention_schedule's; NULL: the call makes its own
} gyre_paged_attention_inputs;

typedef struct gyre_paged_attention_options {
  uint64_t size;
  uint64_t max_query_length;  // 0: 1
  uint64_t max_kv_length;     // 0: what the table holds
  const gyre_attention_mask* mask;
  float scale;           // 0: 1 / sqrt(head_dim)
  int32_t settled_keys;  // not 0: the command ahead writes no keys but those of the call's tokens
  uint64_t min_query_length;  // 0: 1; no sequence has fewer queries
} gyre_paged_attention_options;

GYRE_API gyre_status gyre_paged_attention(gyre_encoder* encoder,
                                          const gyre_paged_attention_inputs* inputs,
                                          const gyre_paged_attention_options* options);

// Which multiprocessor works on which keys, for gyre_paged_attention on CUDA. Make it once per
// step, after the step's lengths and query ranges are in device memory, and pass it to the
// attention of every layer with the same shape of pages, heads and options.
typedef struct gyre_attention_schedule_inputs {
  uint64_t size;
  const gyre_kv_pages* pages;  // of one of the layers
  uint64_t tokens;             // of the calls' q
  uint64_t heads;
  gyre_dtype q_dtype;
  int32_t reserved;
  const gyre_tensor* kv_lengths;  // as in gyre_paged_attention_inputs
  const gyre_tensor* cu_seqlens_q;
  const gyre_tensor* is_prefill;
} gyre_attention_schedule_inputs;

// `options` as the calls have them, max_kv_length given. *schedule is NULL, or what an earlier call
// made of it, whose memory is used again if it is large enough. It stays as it is where the
// device's kernels read no schedule.
GYRE_API gyre_status gyre_attention_schedule(gyre_encoder* encoder,
                                             const gyre_attention_schedule_inputs* inputs,
                                             const gyre_paged_attention_options* options,
                                             gyre_tensor** schedule);

typedef struct gyre_attention_partial_inputs {
  uint64_t size;
  const gyre_tensor* q;
  const gyre_kv_buffer* k_cache;
  const gyre_kv_buffer* v_cache;
  const gyre_tensor* partial;  // f32 [splits, tokens, heads, v_head_dim + 2]
  int32_t latent;              // as in gyre_attention_inputs
  int32_t reserved;
} gyre_attention_partial_inputs;

GYRE_API gyre_status gyre_attention_partial(gyre_encoder* encoder,
                                            const gyre_attention_partial_inputs* inputs,
                                            const gyre_attention_options* options);

typedef struct gyre_attention_merge_inputs {
  uint64_t size;
  const gyre_tensor* partial;
  const gyre_tensor* out;
  const gyre_tensor* lse;
  const gyre_tensor* sink_logits;
} gyre_attention_merge_inputs;

GYRE_API gyre_status gyre_attention_merge(gyre_encoder* encoder,
                                          const gyre_attention_merge_inputs* inputs);

typedef struct gyre_attention_types {
  uint64_t size;
  gyre_dtype q;      // 0: f32
  gyre_kv_format k;  // 0: f16
  gyre_kv_format v;  // 0: f16
  gyre_dtype out;    // 0: f32
  int32_t paged;
  int32_t latent;
} gyre_attention_types;

GYRE_API gyre_status gyre_supports_attention(const gyre_device* device,
                                             const gyre_attention_types* types, int32_t* supported);

// What a cache and a batch attend with.
typedef struct gyre_attend_inputs {
  uint64_t size;
  const gyre_tensor* q;
  const gyre_tensor* out;
  const gyre_tensor* lse;
  // As in gyre_attention_inputs: caches whose calls run one after the other can share it, latent
  // layers and others one each. NULL: the cache or batch keeps its own.
  gyre_tensor** scratch;
} gyre_attend_inputs;

typedef struct gyre_attend_options {
  uint64_t size;
  const gyre_attention_mask* mask;  // window 0: the layer's
  float scale;                      // 0: 1 / sqrt(head_dim)
  int32_t reserved;
} gyre_attend_options;

#ifdef __cplusplus
}
#endif
