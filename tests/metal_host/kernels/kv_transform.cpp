#include "metal/kernels/kv_transform.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_transform)
