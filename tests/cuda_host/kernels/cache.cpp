#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/cache.cu"

GYRE_HOST_KERNELS(GYRE_HOST(kv_extend), GYRE_HOST(bytes_copy), GYRE_HOST(words_write),
                  GYRE_HOST(kv_page_copy))
