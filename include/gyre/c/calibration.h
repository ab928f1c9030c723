#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// KvCalibration: what a calibration says about K or V of one layer; NULL and 0: that part is not
// given.
typedef struct gyre_kv_calibration {
  uint64_t size;
  const gyre_tensor* matrix;  // KvTransform
  const gyre_tensor* inverse;
  const gyre_tensor* mean;
  const gyre_tensor* factor;  // KvFeedback
  const gyre_tensor* diagonal;
  const float* gains;
  uint64_t gain_count;
} gyre_kv_calibration;

typedef struct gyre_kv_transform_inputs {
  uint64_t size;
  const gyre_tensor* x;
  const gyre_tensor* matrix;
  const gyre_tensor* before;
  const gyre_tensor* after;
  const gyre_tensor* out;
} gyre_kv_transform_inputs;

GYRE_API gyre_status gyre_kv_transform(gyre_encoder* encoder,
                                       const gyre_kv_transform_inputs* inputs);

#ifdef __cplusplus
}
#endif
