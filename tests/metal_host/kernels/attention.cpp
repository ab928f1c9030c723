#include "metal/kernels/attention.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(attention)
