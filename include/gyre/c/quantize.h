#pragma once

#include "gyre/c/base.h"
#include "gyre/c/calibration.h"
#include "gyre/c/write.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gyre_kv_quantize_inputs {
  uint64_t size;
  const gyre_tensor* k;
  const gyre_kv_buffer* k_cache;
  const gyre_tensor* v;
  const gyre_kv_buffer* v_cache;
  const gyre_kv_calibration* k_calibration;
  const gyre_kv_calibration* v_calibration;
} gyre_kv_quantize_inputs;

GYRE_API gyre_status gyre_kv_quantize(gyre_encoder* encoder, const gyre_kv_quantize_inputs* inputs,
                                      const gyre_kv_range* options);

typedef struct gyre_kv_dequantize_inputs {
  uint64_t size;
  const gyre_kv_buffer* cache;
  const gyre_tensor* out;
} gyre_kv_dequantize_inputs;

typedef int32_t gyre_kv_domain;
enum { GYRE_RESTORED = 0, GYRE_ROTATED = 1 };

typedef struct gyre_kv_dequantize_options {
  uint64_t size;
  uint64_t first_slot;
  gyre_kv_domain domain;
  int32_t reserved;
} gyre_kv_dequantize_options;

GYRE_API gyre_status gyre_kv_dequantize(gyre_encoder* encoder,
                                        const gyre_kv_dequantize_inputs* inputs,
                                        const gyre_kv_dequantize_options* options);

typedef struct gyre_hadamard_inputs {
  uint64_t size;
  const gyre_tensor* x;
  const gyre_tensor* out;
} gyre_hadamard_inputs;

typedef int32_t gyre_hadamard_direction;
enum { GYRE_HADAMARD_FORWARD = 0, GYRE_HADAMARD_INVERSE = 1 };
typedef int32_t gyre_hadamard_signs;
enum { GYRE_SIGNS_NONE = 0, GYRE_SIGNS_NATIVE = 1, GYRE_SIGNS_MLX_NATIVE = 2 };

typedef struct gyre_hadamard_options {
  uint64_t size;
  gyre_hadamard_direction direction;
  gyre_hadamard_signs signs;
} gyre_hadamard_options;

GYRE_API gyre_status gyre_hadamard(gyre_encoder* encoder, const gyre_hadamard_inputs* inputs,
                                   const gyre_hadamard_options* options);

GYRE_API gyre_status gyre_supports_kv_quantize(const gyre_device* device, gyre_dtype source,
                                               gyre_kv_format format, int32_t* supported);

#ifdef __cplusplus
}
#endif
