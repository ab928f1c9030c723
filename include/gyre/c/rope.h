#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t gyre_rope_pairing;
enum { GYRE_ROPE_SPLIT_HALF = 0, GYRE_ROPE_ADJACENT = 1 };
typedef int32_t gyre_rope_mode;
enum {
  GYRE_ROPE_PLAIN = 0,
  GYRE_ROPE_VISION_2D = 2,
  GYRE_ROPE_SECTIONED = 8,
  GYRE_ROPE_VISION = 24,
  GYRE_ROPE_INTERLEAVED = 40
};
typedef int32_t gyre_rope_span;
enum { GYRE_ROPE_ROTARY_DIM = 0, GYRE_ROPE_HEAD_DIM = 1 };

typedef struct gyre_rope_options {
  uint64_t size;
  gyre_rope_pairing pairing;
  gyre_rope_mode mode;
  gyre_rope_span partner;
  gyre_rope_span exponent;
  double base;  // 0: 10000
  uint32_t sections[4];
  uint32_t rotary_dim;  // 0: the whole head
  float magnitude;      // 0: 1
} gyre_rope_options;

typedef struct gyre_rope_inputs {
  uint64_t size;
  const gyre_tensor* x;
  const gyre_tensor* positions;
  const gyre_tensor* out;
  const gyre_tensor* k;
  const gyre_tensor* k_out;
  const gyre_tensor* frequencies;
  const gyre_tensor* factors;
} gyre_rope_inputs;

GYRE_API gyre_status gyre_rope(gyre_encoder* encoder, const gyre_rope_inputs* inputs,
                               const gyre_rope_options* options);

typedef struct gyre_rope_norm {
  uint64_t size;
  float epsilon;  // if has_epsilon, else 1e-6
  int32_t has_epsilon;
  float weight_offset;
  int32_t reserved;
} gyre_rope_norm;

typedef struct gyre_norm_rope_inputs {
  uint64_t size;
  const gyre_tensor* x;
  const gyre_tensor* positions;
  const gyre_tensor* out;
  const gyre_tensor* weight;
  const gyre_tensor* second;
  const gyre_tensor* k;
  const gyre_tensor* k_out;
  const gyre_tensor* k_weight;
  const gyre_tensor* k_second;
  const gyre_tensor* frequencies;
  const gyre_tensor* factors;
} gyre_norm_rope_inputs;

typedef struct gyre_norm_rope_options {
  uint64_t size;
  const gyre_rope_options* rope;  // NULL: the defaults, unless no_rope
  const gyre_rope_norm* norm;     // NULL: the defaults
  int32_t no_rope;                // the norm alone, no positions
  int32_t reserved;
} gyre_norm_rope_options;

GYRE_API gyre_status gyre_norm_rope(gyre_encoder* encoder, const gyre_norm_rope_inputs* inputs,
                                    const gyre_norm_rope_options* options);

GYRE_API gyre_status gyre_supports_rope(const gyre_device* device, gyre_dtype x, gyre_dtype out,
                                        int32_t* supported);

typedef int32_t gyre_rope_type;
enum {
  GYRE_ROPE_STANDARD = 0,
  GYRE_ROPE_LINEAR = 1,
  GYRE_ROPE_NTK = 2,
  GYRE_ROPE_DYNAMIC = 3,
  GYRE_ROPE_YARN = 4,
  GYRE_ROPE_LLAMA3 = 5
};

typedef struct gyre_rope_config {
  uint64_t size;
  double rope_theta;  // 0: 10000
  uint32_t rotary_dim;
  gyre_rope_type rope_type;
  double factor;  // 0: 1
  double original_max_position_embeddings;
  double seq_len;
  double low_freq_factor;   // 0: 1
  double high_freq_factor;  // 0: 4
  double beta_fast;         // 0: 32
  double beta_slow;         // 0: 1
  double attention_factor;  // 0: computed
  double mscale;            // 0: none
  double mscale_all_dim;    // 0: none
  int32_t no_truncate;
  int32_t reserved;
} gyre_rope_config;

// Writes rotary_dim / 2 numbers to `inverse`, radians per position, which must hold `count`; fewer
// or more are refused.
GYRE_API gyre_status gyre_rope_frequencies(const gyre_rope_config* config, double* inverse,
                                           uint64_t count, double* attention_factor);
GYRE_API gyre_status gyre_rope_table(const gyre_device* device, const double* radians_per_position,
                                     uint64_t count, gyre_tensor** table);

#ifdef __cplusplus
}
#endif
