#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/kv_dequantize.cu"

GYRE_HOST_KERNELS(
    GYRE_HOST(kv_dequantize<float, 16>), GYRE_HOST(kv_dequantize<gyre::cuda::Half, 16>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 16>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 17>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 18>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 19>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 20>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 21>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 32>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 33>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 34>),
    GYRE_HOST(kv_dequantize<gyre::cuda::BFloat16, 35>), GYRE_HOST(kv_dequantize<float, 17>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 17>), GYRE_HOST(kv_dequantize<float, 18>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 18>), GYRE_HOST(kv_dequantize<float, 19>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 19>), GYRE_HOST(kv_dequantize<float, 20>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 20>), GYRE_HOST(kv_dequantize<float, 21>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 21>), GYRE_HOST(kv_dequantize<float, 32>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 32>), GYRE_HOST(kv_dequantize<float, 33>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 33>), GYRE_HOST(kv_dequantize<float, 34>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 34>), GYRE_HOST(kv_dequantize<float, 35>),
    GYRE_HOST(kv_dequantize<gyre::cuda::Half, 35>))
