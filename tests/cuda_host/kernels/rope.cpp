#include "cuda_host/kernel_list.h"
// After it
#include "cuda/kernels/rope.cu"

#define GYRE_OUT(in, out)                                                        \
  GYRE_HOST(rope<in, out, false, false>), GYRE_HOST(rope<in, out, true, false>), \
      GYRE_HOST(rope<in, out, false, true>), GYRE_HOST(rope<in, out, true, true>),
#define GYRE_IN(in) GYRE_EACH_FLOAT_TO(GYRE_OUT, in)

GYRE_HOST_KERNELS(GYRE_EACH_FLOAT(GYRE_IN))
