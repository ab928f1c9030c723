#pragma once
// What every kernel gets behind its params; the host's side is cuda/kernel.h.
#include "abi/types.h"

namespace gyre::cuda {

struct Args {
  uint64_t at[12];  // in the order of KernelInfo::args; 0: absent
};

// Says that the memory is global, for shorter loads and stores.
template <class T>
__device__ T* pointer(uint64_t address) {
#if defined(GYRE_CUDA_HOST)
  return reinterpret_cast<T*>(address);
#else
  return reinterpret_cast<T*>(__cvta_global_to_generic(address));
#endif
}

}  // namespace gyre::cuda
