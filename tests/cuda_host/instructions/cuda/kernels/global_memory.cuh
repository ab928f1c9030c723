#pragma once
// src/cuda/kernels/global_memory.cuh on fibers: a thread that uses memory of others before it waits
// is refused.
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
inline void pdl_wait() { cuda_host::pass_pdl_wait(); }
inline void pdl_read_early() { cuda_host::block->running->pdl_waited = true; }
inline void pdl_launch_dependents() {}
inline void prefetch(const void* /*at*/) {}
inline void prefetch_l2(const void* /*at*/) {}

}  // namespace gyre::cuda
