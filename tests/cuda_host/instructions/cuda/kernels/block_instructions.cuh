#pragma once
// src/cuda/kernels/block_instructions.cuh on fibers.
#include "abi/types.h"

namespace gyre::cuda {

inline unsigned char* dynamic_shared() { return cuda_host::dynamic_shared(); }
inline float* dynamic_floats() { return reinterpret_cast<float*>(dynamic_shared()); }
inline float* dynamic_float4s() { return dynamic_floats(); }
inline uint32_t dynamic_shared_bytes() { return cuda_host::dynamic_shared_bytes(); }
using SharedAddress = unsigned char*;
inline SharedAddress shared_address(const void* place) {
  return const_cast<unsigned char*>(static_cast<const unsigned char*>(place));
}

#define GYRE_CLUSTER(size)
inline uint32_t cluster_rank() { return cuda_host::cluster_rank(); }
struct TransactionBarrier {
  uint32_t expected, arrived;
};
inline void expect_transactions(TransactionBarrier* barrier, uint32_t bytes) {
  *barrier = {bytes, 0};
}
inline void cluster_arrive() {}
inline void cluster_wait() { cuda_host::cluster_wait(); }
inline void dsmem_store(float2 x, float* local, TransactionBarrier* barrier, uint32_t rank) {
  *static_cast<float2*>(cuda_host::cluster_pointer(local, rank)) = x;
  static_cast<TransactionBarrier*>(cuda_host::cluster_pointer(barrier, rank))->arrived += sizeof(x);
}
inline void wait_for_transactions(const TransactionBarrier* barrier) {
  while (barrier->arrived != barrier->expected) cuda_host::yield();
}

// Completes a phase when so many have arrived.
struct PhaseBarrier {  // of 8 bytes, as an mbarrier
  uint16_t count, missing;
  uint32_t phase;
};
inline void init_barrier(PhaseBarrier* barrier, uint32_t count) {
  *barrier = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
inline void invalidate_barrier(PhaseBarrier*) {}
inline void arrive(PhaseBarrier* barrier) {
  if (--barrier->missing == 0) barrier->missing = barrier->count, barrier->phase ^= 1;
}
inline void wait_for_phase(const PhaseBarrier* barrier, uint32_t parity) {
  while (barrier->phase == parity) cuda_host::yield();
}
inline void ldmatrix_transposed(uint32_t (&a)[4], const void* row) {
  cuda_host::ldmatrix<true>(a, row);
}
inline void ldmatrix(uint32_t (&a)[4], SharedAddress row) { cuda_host::ldmatrix<false>(a, row); }
inline void ldmatrix_transposed(uint32_t (&a)[4], SharedAddress row) {
  cuda_host::ldmatrix<true>(a, row);
}
template <uint32_t kBytes>
inline void copy_async(SharedAddress to, const void* from, bool present) {
  cuda_host::copy_later(to, present ? from : nullptr, kBytes);
}
inline void copy_commit() { cuda_host::close_copies(); }
template <uint32_t kLeft>
inline void copy_wait() {
  cuda_host::wait_for_copies(kLeft);
}
inline void arrive_when_copied(PhaseBarrier* barrier) {
  copy_commit();
  copy_wait<0>();
  arrive(barrier);
}
inline void arrive_expecting(PhaseBarrier* barrier, uint32_t) { arrive(barrier); }
inline void copy_bulk(SharedAddress to, uint64_t from, uint32_t bytes, PhaseBarrier*) {
  cuda_host::require_pdl_wait();
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
}

template <uint32_t kCount>
inline void sync_named_barrier(uint32_t group) {
  cuda_host::wait_for_warps(group, kCount);
}

}  // namespace gyre::cuda
