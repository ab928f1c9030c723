#include "metal/kernels/bytes_copy.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(bytes_copy)
