#pragma once
// Access to global memory: pointers, and programmatic dependent launch (PDL), which says when it
// may be touched.
#include "abi/types.h"

namespace gyre::cuda {

// Says that the memory is global, for shorter loads and stores.
template <class T>
__device__ T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(__cvta_global_to_generic(address));
}

// A kernel may start before the one ahead of it has ended. Every block waits here for
// that end before it reads or writes memory that other kernels see.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here to pdl_wait, a kernel reads only what commands that have ended wrote (EarlyBits).
__device__ inline void pdl_read_early() {}
// Lets the next kernel start, as far as this block is concerned.
__device__ inline void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for a line that will be read, without waiting for it.
__device__ inline void prefetch(const void* at) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(at)));
}
__device__ inline void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}

}  // namespace gyre::cuda
