#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

// One thread at a time. What the ops are given may be destroyed before the list is submitted.
GYRE_API gyre_status gyre_encoder_create(const gyre_device* device, gyre_encoder** encoder);
GYRE_API void gyre_encoder_destroy(gyre_encoder* encoder);
GYRE_API gyre_status gyre_encoder_size(const gyre_encoder* encoder, uint32_t* commands);
GYRE_API gyre_status gyre_encoder_barriers(const gyre_encoder* encoder, uint32_t* barriers);
GYRE_API gyre_status gyre_encoder_clear(gyre_encoder* encoder);

// `fence` may be NULL for submit: the work goes on, nobody waits for it.
GYRE_API gyre_status gyre_encoder_submit(gyre_encoder* encoder, gyre_fence** fence);
GYRE_API gyre_status gyre_encoder_submit_on(gyre_encoder* encoder, uint64_t stream,
                                            gyre_fence** fence);
GYRE_API gyre_status gyre_encoder_instantiate(gyre_encoder* encoder, gyre_graph** graph);

#ifdef __cplusplus
}
#endif
