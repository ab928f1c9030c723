#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/any/prefill.cu"

GYRE_HOST_KERNELS(GYRE_HOST(attention_prefill<0u, 0u>), GYRE_HOST(attention_prefill<0u, 1u>),
                  GYRE_HOST(attention_prefill<0u, 2u>), GYRE_HOST(attention_prefill<0u, 16u>),
                  GYRE_HOST(attention_prefill<0u, 32u>), GYRE_HOST(attention_prefill<1u, 0u>),
                  GYRE_HOST(attention_prefill<1u, 1u>), GYRE_HOST(attention_prefill<1u, 2u>),
                  GYRE_HOST(attention_prefill<1u, 16u>), GYRE_HOST(attention_prefill<1u, 17u>),
                  GYRE_HOST(attention_prefill<1u, 19u>), GYRE_HOST(attention_prefill<1u, 21u>),
                  GYRE_HOST(attention_prefill<1u, 33u>), GYRE_HOST(attention_prefill<2u, 0u>),
                  GYRE_HOST(attention_prefill<2u, 1u>), GYRE_HOST(attention_prefill<2u, 2u>),
                  GYRE_HOST(attention_prefill<2u, 17u>), GYRE_HOST(attention_prefill<2u, 18u>),
                  GYRE_HOST(attention_prefill<2u, 20u>), GYRE_HOST(attention_prefill<2u, 21u>),
                  GYRE_HOST(attention_prefill<2u, 34u>), GYRE_HOST(attention_prefill<16u, 0u>),
                  GYRE_HOST(attention_prefill<16u, 19u>), GYRE_HOST(attention_prefill<17u, 1u>),
                  GYRE_HOST(attention_prefill<17u, 2u>), GYRE_HOST(attention_prefill<17u, 16u>),
                  GYRE_HOST(attention_prefill<17u, 17u>), GYRE_HOST(attention_prefill<17u, 19u>),
                  GYRE_HOST(attention_prefill<17u, 35u>), GYRE_HOST(attention_prefill<18u, 0u>),
                  GYRE_HOST(attention_prefill<18u, 17u>), GYRE_HOST(attention_prefill<18u, 18u>),
                  GYRE_HOST(attention_prefill<19u, 0u>), GYRE_HOST(attention_prefill<19u, 1u>),
                  GYRE_HOST(attention_prefill<19u, 2u>), GYRE_HOST(attention_prefill<19u, 16u>),
                  GYRE_HOST(attention_prefill<19u, 18u>), GYRE_HOST(attention_prefill<19u, 21u>),
                  GYRE_HOST(attention_prefill<20u, 1u>), GYRE_HOST(attention_prefill<20u, 34u>),
                  GYRE_HOST(attention_prefill<21u, 0u>), GYRE_HOST(attention_prefill<21u, 18u>),
                  GYRE_HOST(attention_prefill<21u, 32u>), GYRE_HOST(attention_prefill<32u, 0u>),
                  GYRE_HOST(attention_prefill<32u, 32u>), GYRE_HOST(attention_prefill<33u, 1u>),
                  GYRE_HOST(attention_prefill<34u, 1u>), GYRE_HOST(attention_prefill<34u, 2u>),
                  GYRE_HOST(attention_prefill<35u, 20u>))
