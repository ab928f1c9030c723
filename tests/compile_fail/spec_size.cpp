// A Spec is the pipeline key and has exactly 8 bytes.
#include "abi/kernels.h"

struct Spec {
  uint8_t dtype;
#if defined(GYRE_BREAK)
  uint8_t unused[8];
#else
  uint8_t unused[7];
#endif
};

gyre::Kernel<Spec, uint64_t> kernel("any", {});
