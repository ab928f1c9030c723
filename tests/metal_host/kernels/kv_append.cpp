#include "metal/kernels/kv_append.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_append)
