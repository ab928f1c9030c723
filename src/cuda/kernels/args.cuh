#pragma once
// What every kernel gets behind its params; the host's side is cuda/kernel.h.
#include "abi/types.h"

namespace gyre::cuda {

struct Args {
  uint64_t at[12];  // in the order of KernelInfo::args; 0: absent
};

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace gyre::cuda
