#include "metal/kernels/kv_page_copy.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_page_copy)
