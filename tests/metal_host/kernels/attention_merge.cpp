#include "metal/kernels/attention_merge.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(attention_merge)
