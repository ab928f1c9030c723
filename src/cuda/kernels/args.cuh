#pragma once
// What every kernel gets beside its params.
#include "abi/types.h"

namespace gyre::cuda {

// Addresses in the order of KernelInfo::args; 0 is an absent argument.
struct Args {
  uint64_t at[12];
};

template <class T>
__device__ T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace gyre::cuda
