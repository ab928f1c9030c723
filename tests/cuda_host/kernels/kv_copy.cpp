#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/kv_copy.cu"

#define GYRE_OUT(in, out) GYRE_HOST(kv_copy<in, out>),
#define GYRE_IN(in) GYRE_EACH_FLOAT_TO(GYRE_OUT, in)

GYRE_HOST_KERNELS(GYRE_EACH_FLOAT(GYRE_IN))
