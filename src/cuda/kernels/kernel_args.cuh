#pragma once
// What a kernel gets behind its params, as the host and the kernels see it.
#include "abi/types.h"

namespace gyre::cuda {

struct Args {
  uint64_t at[16];  // addresses in the order of KernelInfo::args; 0: absent
};

}  // namespace gyre::cuda
