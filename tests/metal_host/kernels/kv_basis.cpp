#include "metal/kernels/kv_basis.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(kv_basis)
