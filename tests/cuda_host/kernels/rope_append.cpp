#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/rope_append.cu"

GYRE_HOST_KERNELS(
    GYRE_HOST(rope_append<float, 0, 0, false, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<gyre::cuda::Half, 0, 1, false, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<float, 0, 17, true, false, int32_t, 1>),
    GYRE_HOST(rope_append<float, 1, 1, false, true, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<gyre::cuda::Half, 1, 2, false, true, int32_t, 1>),
    GYRE_HOST(rope_append<float, 1, 18, true, false, int32_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::Half, 2, 0, true, true, gyre::abi::KvState, 2>),
    GYRE_HOST(rope_append<float, 2, 2, false, false, int32_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::Half, 2, 20, false, false, int32_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::BFloat16, 0, 2, false, false, int32_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::BFloat16, 1, 0, true, false, int64_t, 2>),
    GYRE_HOST(rope_append<gyre::cuda::BFloat16, 2, 1, true, true, gyre::abi::KvState, 2>),
    GYRE_HOST(rope_append<float, 16, 16, false, true, int64_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::BFloat16, 17, 16, false, true, int64_t, 1>),
    GYRE_HOST(rope_append<gyre::cuda::BFloat16, 17, 19, false, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<float, 18, 18, false, false, int64_t, 1>),
    GYRE_HOST(rope_append<float, 19, 0, true, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<gyre::cuda::Half, 19, 1, true, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<float, 20, 18, true, false, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<float, 21, 2, false, true, int32_t, 1>),
    GYRE_HOST(rope_append<float, 21, 18, true, true, gyre::abi::KvState, 1>),
    GYRE_HOST(rope_append<float, 21, 18, false, false, int64_t, 4>),
    GYRE_HOST(rope_append<float, 21, 21, false, true, gyre::abi::KvState, 1>))
