#include "metal/kernels/kv_dequantize.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_dequantize)
