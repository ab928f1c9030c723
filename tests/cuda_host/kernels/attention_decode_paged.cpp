#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/decode/decode.cu"

#define PAGED(...) GYRE_HOST(attention_decode_paged<__VA_ARGS__>)

GYRE_HOST_KERNELS(
    PAGED(1u, 1u, 64u, 8u, true), PAGED(1u, 1u, 128u, 8u, false), PAGED(1u, 1u, 128u, 8u, true),
    PAGED(1u, 1u, 128u, 16u, false), PAGED(1u, 1u, 128u, 16u, true), PAGED(2u, 2u, 64u, 16u, true),
    PAGED(1u, 1u, 64u, 16u, true), PAGED(21u, 1u, 128u, 16u, true),
    PAGED(21u, 1u, 128u, 16u, false), PAGED(1u, 1u, 256u, 8u, true), PAGED(1u, 2u, 64u, 8u, true),
    PAGED(1u, 2u, 256u, 8u, true), PAGED(1u, 16u, 64u, 4u, false),
    PAGED(1u, 17u, 64u, 4u, true, 256u), PAGED(1u, 17u, 256u, 4u, false),
    PAGED(1u, 18u, 64u, 4u, false), PAGED(1u, 19u, 64u, 4u, true), PAGED(1u, 21u, 64u, 4u, true),
    PAGED(2u, 1u, 64u, 8u, true), PAGED(2u, 1u, 256u, 8u, true), PAGED(2u, 2u, 64u, 8u, false),
    PAGED(2u, 2u, 64u, 8u, true, 256u), PAGED(2u, 2u, 256u, 8u, false),
    PAGED(2u, 16u, 64u, 4u, true), PAGED(2u, 17u, 64u, 4u, false),
    PAGED(2u, 18u, 64u, 4u, true, 256u), PAGED(2u, 18u, 256u, 4u, false),
    PAGED(2u, 19u, 64u, 4u, false), PAGED(2u, 20u, 64u, 4u, true), PAGED(2u, 21u, 64u, 4u, true),
    PAGED(2u, 21u, 64u, 4u, false, 256u), PAGED(16u, 1u, 64u, 8u, false),
    PAGED(16u, 2u, 64u, 8u, true, 256u), PAGED(16u, 16u, 64u, 8u, false),
    PAGED(16u, 19u, 256u, 4u, true), PAGED(17u, 1u, 64u, 8u, true), PAGED(17u, 2u, 64u, 8u, false),
    PAGED(17u, 16u, 64u, 8u, false, 256u), PAGED(17u, 19u, 64u, 8u, true, 256u),
    PAGED(18u, 1u, 64u, 8u, false, 256u), PAGED(18u, 2u, 64u, 8u, true),
    PAGED(18u, 18u, 96u, 4u, false), PAGED(18u, 18u, 64u, 4u, false),
    PAGED(18u, 18u, 64u, 8u, false), PAGED(18u, 18u, 128u, 4u, false),
    PAGED(18u, 18u, 128u, 8u, false), PAGED(19u, 1u, 64u, 8u, true), PAGED(19u, 2u, 64u, 8u, true),
    PAGED(19u, 2u, 64u, 8u, false, 256u), PAGED(19u, 16u, 64u, 16u, true),
    PAGED(19u, 18u, 64u, 16u, false), PAGED(19u, 21u, 64u, 16u, true),
    PAGED(20u, 1u, 256u, 8u, false), PAGED(20u, 2u, 64u, 8u, true),
    PAGED(20u, 20u, 64u, 8u, false, 256u), PAGED(21u, 1u, 64u, 8u, true),
    PAGED(21u, 1u, 64u, 8u, true, 256u), PAGED(21u, 1u, 128u, 8u, false),
    PAGED(21u, 1u, 128u, 8u, true), PAGED(21u, 2u, 256u, 8u, true), PAGED(21u, 17u, 64u, 8u, true),
    PAGED(21u, 18u, 64u, 4u, false), PAGED(21u, 20u, 64u, 8u, false),
    PAGED(21u, 21u, 128u, 4u, false), PAGED(21u, 21u, 128u, 8u, false),
    PAGED(21u, 21u, 128u, 8u, true))
