#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/any/prefill.cu"

#define PREFILL(...) GYRE_HOST(attention_prefill<__VA_ARGS__>)

GYRE_HOST_KERNELS(PREFILL(0u, 0u), PREFILL(0u, 1u), PREFILL(0u, 2u), PREFILL(0u, 16u),
                  PREFILL(0u, 32u), PREFILL(1u, 0u), PREFILL(1u, 1u), PREFILL(1u, 2u),
                  PREFILL(1u, 16u), PREFILL(1u, 17u), PREFILL(1u, 19u), PREFILL(1u, 21u),
                  PREFILL(1u, 33u), PREFILL(2u, 0u), PREFILL(2u, 1u), PREFILL(2u, 2u),
                  PREFILL(2u, 17u), PREFILL(2u, 18u), PREFILL(2u, 20u), PREFILL(2u, 21u),
                  PREFILL(2u, 34u), PREFILL(16u, 0u), PREFILL(16u, 19u), PREFILL(17u, 1u),
                  PREFILL(17u, 2u), PREFILL(17u, 16u), PREFILL(17u, 17u), PREFILL(17u, 19u),
                  PREFILL(17u, 35u), PREFILL(18u, 0u), PREFILL(18u, 17u), PREFILL(18u, 18u),
                  PREFILL(19u, 0u), PREFILL(19u, 1u), PREFILL(19u, 2u), PREFILL(19u, 16u),
                  PREFILL(19u, 18u), PREFILL(19u, 21u), PREFILL(20u, 1u), PREFILL(20u, 34u),
                  PREFILL(21u, 0u), PREFILL(21u, 18u), PREFILL(21u, 32u), PREFILL(32u, 0u),
                  PREFILL(32u, 32u), PREFILL(33u, 1u), PREFILL(34u, 1u), PREFILL(34u, 2u),
                  PREFILL(35u, 20u))
