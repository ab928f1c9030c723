#include "metal/kernels/attention_many_rows.metal"

#include "metal_host/metal_host.h"

GYRE_METAL_KERNEL(attention_many_rows)
