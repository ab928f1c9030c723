#include "metal/kernels/rope_append.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(rope_append)
