#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/latent/latent.cu"

#define GYRE_HOST_LATENT(k, v, latent, rotary, keys, bf16)               \
  GYRE_HOST(attention_latent_prepare<k, v, latent, rotary, keys, bf16>), \
      GYRE_HOST(attention_latent<k, v, latent, rotary, keys, bf16>),     \
      GYRE_HOST(attention_latent_reduce<k, v, latent, rotary, keys, bf16>)

GYRE_HOST_KERNELS(GYRE_HOST_LATENT(1u, 1u, 128u, 32u, 64u, false),
                  GYRE_HOST_LATENT(2u, 2u, 128u, 32u, 64u, false),
                  GYRE_HOST_LATENT(2u, 2u, 128u, 32u, 64u, true),
                  GYRE_HOST_LATENT(18u, 1u, 128u, 32u, 64u, false),
                  GYRE_HOST_LATENT(18u, 21u, 128u, 32u, 64u, false),
                  GYRE_HOST_LATENT(18u, 21u, 512u, 64u, 64u, false),
                  GYRE_HOST_LATENT(21u, 2u, 256u, 32u, 64u, false))
