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

// Comes first in a kernel that CudaKernel::starts_early marks: a replay may start it before the
// kernels it depends on have ended. It touches no memory until this returns, and lets those behind
// it start in turn.
__device__ inline void wait_for_earlier() {
#if !defined(GYRE_CUDA_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gyre::cuda
