#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/write.cu"

GYRE_HOST_KERNELS(
    GYRE_HOST(kv_append<float, 0, 0>), GYRE_HOST(kv_append<gyre::cuda::Half, 0, 1>),
    GYRE_HOST(kv_append<float, 0, 16>), GYRE_HOST(kv_append<float, 0, 32>),
    GYRE_HOST(kv_append<float, 1, 1>), GYRE_HOST(kv_append<gyre::cuda::Half, 1, 19>),
    GYRE_HOST(kv_append<float, 1, 33>), GYRE_HOST(kv_append<gyre::cuda::Half, 2, 0>),
    GYRE_HOST(kv_append<gyre::cuda::Half, 2, 1>), GYRE_HOST(kv_append<float, 2, 2>),
    GYRE_HOST(kv_append<float, 2, 18>), GYRE_HOST(kv_append<float, 2, 34>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 0, 2>), GYRE_HOST(kv_append<gyre::cuda::Half, 16, 1>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 1, 0>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 1, 2>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 21, 17>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 34, 20>),
    GYRE_HOST(kv_append<gyre::cuda::BFloat16, 35, 2>),
    GYRE_HOST(kv_append<gyre::cuda::Half, 17, 2>),
    GYRE_HOST(kv_append<gyre::cuda::CalibratedRow, 17, 21>),
    GYRE_HOST(kv_append<gyre::cuda::CalibratedRow, 18, 17>),
    GYRE_HOST(kv_append<gyre::cuda::CalibratedRow, 18, 18>),
    GYRE_HOST(kv_append<gyre::cuda::CalibratedRow, 18, 21>),
    GYRE_HOST(kv_append<gyre::cuda::Half, 18, 20>), GYRE_HOST(kv_append<float, 19, 0>),
    GYRE_HOST(kv_append<gyre::cuda::Half, 20, 35>),
    GYRE_HOST(kv_append<gyre::cuda::CalibratedRow, 21, 16>), GYRE_HOST(kv_append<float, 21, 21>),
    GYRE_HOST(kv_append<gyre::cuda::Half, 32, 1>), GYRE_HOST(kv_append<gyre::cuda::Half, 33, 32>),
    GYRE_HOST(kv_append<float, 35, 0>), GYRE_HOST(kv_append<float, 35, 20>))
