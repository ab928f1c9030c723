#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/attention/many_rows/many_rows.cu"

#define ROWS(...) GYRE_HOST(attention_many_rows<__VA_ARGS__>)
#define UNPACK(...) GYRE_HOST(attention_many_rows_unpack<__VA_ARGS__>)
#define DRAFTS(...) GYRE_HOST(attention_drafts<__VA_ARGS__>)

GYRE_HOST_KERNELS(
    ROWS(1u, 1u, 64u, 64u, 0u), ROWS(1u, 1u, 64u, 64u, 2u), ROWS(1u, 1u, 80u, 80u, 1u),
    ROWS(1u, 1u, 160u, 160u, 0u), ROWS(1u, 1u, 192u, 128u, 3u), ROWS(1u, 1u, 192u, 192u, 0u),
    ROWS(1u, 2u, 80u, 80u, 0u), ROWS(1u, 2u, 112u, 112u, 1u), ROWS(1u, 17u, 64u, 256u, 1u),
    ROWS(1u, 18u, 64u, 64u, 1u), ROWS(1u, 19u, 192u, 128u, 0u), ROWS(1u, 21u, 192u, 128u, 1u),
    ROWS(2u, 1u, 96u, 96u, 0u), ROWS(2u, 1u, 160u, 160u, 1u), ROWS(2u, 2u, 96u, 96u, 1u),
    ROWS(2u, 2u, 112u, 112u, 0u), ROWS(2u, 2u, 192u, 192u, 1u), ROWS(2u, 16u, 64u, 64u, 1u),
    ROWS(2u, 19u, 64u, 64u, 1u), ROWS(2u, 20u, 64u, 64u, 0u), ROWS(16u, 1u, 64u, 64u, 1u),
    ROWS(16u, 2u, 64u, 256u, 1u), ROWS(16u, 2u, 256u, 256u, 1u), ROWS(16u, 16u, 128u, 128u, 0u),
    ROWS(17u, 17u, 128u, 128u, 0u), ROWS(17u, 17u, 128u, 128u, 1u), ROWS(18u, 1u, 64u, 256u, 1u),
    ROWS(18u, 2u, 64u, 64u, 0u), ROWS(18u, 2u, 64u, 64u, 1u), ROWS(18u, 18u, 64u, 64u, 0u),
    ROWS(18u, 18u, 64u, 64u, 1u), ROWS(18u, 18u, 128u, 128u, 0u), ROWS(18u, 18u, 128u, 128u, 3u),
    ROWS(18u, 18u, 256u, 256u, 2u), ROWS(19u, 19u, 128u, 128u, 0u), ROWS(19u, 19u, 128u, 128u, 1u),
    ROWS(20u, 1u, 256u, 256u, 0u), ROWS(20u, 2u, 64u, 64u, 1u), ROWS(20u, 20u, 128u, 128u, 1u),
    ROWS(21u, 1u, 64u, 64u, 1u), ROWS(21u, 1u, 64u, 256u, 1u), ROWS(21u, 1u, 128u, 128u, 0u),
    ROWS(21u, 1u, 128u, 128u, 1u), ROWS(21u, 21u, 64u, 64u, 0u), ROWS(21u, 21u, 64u, 64u, 1u),
    ROWS(21u, 21u, 128u, 128u, 0u), ROWS(16u, 21u, 128u, 128u, 7u), ROWS(21u, 21u, 64u, 64u, 7u),
    ROWS(21u, 21u, 256u, 256u, 7u), ROWS(21u, 21u, 128u, 128u, 7u), UNPACK(16u, 16u, 128u, 128u),
    UNPACK(17u, 17u, 128u, 128u), UNPACK(18u, 18u, 64u, 64u), UNPACK(18u, 18u, 128u, 128u),
    UNPACK(18u, 18u, 256u, 256u), UNPACK(18u, 21u, 128u, 128u), UNPACK(19u, 19u, 128u, 128u),
    UNPACK(20u, 20u, 128u, 128u), UNPACK(21u, 18u, 64u, 64u), UNPACK(21u, 21u, 64u, 64u),
    UNPACK(21u, 21u, 128u, 128u), DRAFTS(16u, 16u, 64u, 64u, 2u), DRAFTS(18u, 18u, 64u, 64u, 1u),
    DRAFTS(18u, 18u, 64u, 64u, 2u), DRAFTS(18u, 18u, 128u, 128u, 2u),
    DRAFTS(20u, 20u, 64u, 256u, 1u), DRAFTS(21u, 17u, 64u, 64u, 2u), DRAFTS(21u, 18u, 64u, 64u, 1u),
    DRAFTS(21u, 20u, 64u, 64u, 2u), DRAFTS(21u, 21u, 128u, 128u, 1u),
    DRAFTS(21u, 21u, 128u, 128u, 2u))
