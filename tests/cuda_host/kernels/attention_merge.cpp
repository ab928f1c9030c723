#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/merge.cu"

#define GYRE_OUT(out) GYRE_HOST(attention_merge<out>),

GYRE_HOST_KERNELS(GYRE_EACH_FLOAT(GYRE_OUT))
