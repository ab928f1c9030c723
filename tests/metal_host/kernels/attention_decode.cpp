#include "metal/kernels/attention_decode.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(attention_decode)
