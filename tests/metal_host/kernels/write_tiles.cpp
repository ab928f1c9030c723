#include "metal/kernels/write_tiles.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(write_tiles)
