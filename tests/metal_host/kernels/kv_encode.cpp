#include "metal/kernels/kv_encode.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_encode)
