#pragma once

#include "gyre/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

GYRE_API gyre_status gyre_fence_wait(const gyre_fence* fence);
GYRE_API gyre_status gyre_fence_done(const gyre_fence* fence, int32_t* done);
GYRE_API void gyre_fence_destroy(gyre_fence* fence);

#ifdef __cplusplus
}
#endif
