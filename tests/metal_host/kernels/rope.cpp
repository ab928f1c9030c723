#include "metal/kernels/rope.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(rope)
