#include "metal/kernels/kv_feedback.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_feedback)
