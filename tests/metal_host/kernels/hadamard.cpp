#include "metal/kernels/hadamard.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(hadamard)
