#pragma once
#include "cuda/kernels/arguments.cuh"

namespace gyre::cuda {

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
