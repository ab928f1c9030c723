#pragma once
// What a kernel gets behind its params, as the host and the kernels see it.
#include "abi/types.h"

namespace gyre::cuda {

struct Args {
  uint64_t at[16];  // addresses in the order of KernelInfo::args; 0: absent
  // What may be read before pdl_wait, a bit for each argument. cuda/early_reads.h computes them.
  uint32_t early;      // no command that may still run writes the argument
  uint32_t early_old;  // such commands change at most tokens that they append
};

}  // namespace gyre::cuda
