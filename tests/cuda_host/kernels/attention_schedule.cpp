#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/schedule.cu"

GYRE_HOST_KERNELS(GYRE_HOST(attention_schedule))
