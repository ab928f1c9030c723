#include "metal/kernels/words_write.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(words_write)
