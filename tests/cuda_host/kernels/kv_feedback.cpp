#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/kv_feedback.cu"

GYRE_HOST_KERNELS(
    GYRE_HOST(kv_feedback<float, 16, 16>), GYRE_HOST(kv_feedback<gyre::cuda::Half, 16, 16>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 16, 0>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 17, 17>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 18, 18>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 19, 19>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 19, 21>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 20, 20>),
    GYRE_HOST(kv_feedback<gyre::cuda::BFloat16, 21, 16>), GYRE_HOST(kv_feedback<float, 17, 17>),
    GYRE_HOST(kv_feedback<gyre::cuda::Half, 17, 17>), GYRE_HOST(kv_feedback<float, 17, 21>),
    GYRE_HOST(kv_feedback<float, 18, 0>), GYRE_HOST(kv_feedback<float, 0, 21>),
    GYRE_HOST(kv_feedback<float, 18, 21>), GYRE_HOST(kv_feedback<float, 18, 17>),
    GYRE_HOST(kv_feedback<float, 18, 18>), GYRE_HOST(kv_feedback<gyre::cuda::Half, 18, 18>),
    GYRE_HOST(kv_feedback<float, 19, 19>), GYRE_HOST(kv_feedback<gyre::cuda::Half, 19, 19>),
    GYRE_HOST(kv_feedback<float, 19, 21>), GYRE_HOST(kv_feedback<gyre::cuda::Half, 19, 21>),
    GYRE_HOST(kv_feedback<gyre::cuda::Half, 20, 0>), GYRE_HOST(kv_feedback<float, 20, 20>),
    GYRE_HOST(kv_feedback<gyre::cuda::Half, 20, 20>), GYRE_HOST(kv_feedback<float, 21, 16>),
    GYRE_HOST(kv_feedback<gyre::cuda::Half, 21, 16>))
