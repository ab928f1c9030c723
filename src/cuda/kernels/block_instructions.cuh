#pragma once
// Shared memory of a block and of a cluster, copies to it, and barriers, by PTX.
#include "abi/types.h"

namespace gyre::cuda {

inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return bytes;
}
// Dynamic shared memory without padding ahead of it, where a kernel has static shared memory, too.
inline float* dynamic_floats() {
  extern __shared__ float floats[];
  return floats;
}
inline float* dynamic_float4s() {
  extern __shared__ uint4 quads[];
  return reinterpret_cast<float*>(quads);
}
inline uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}
using SharedAddress = uint32_t;
inline SharedAddress shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// An mbarrier that completes a phase when its count of threads has arrived. Initialized by one
// thread; phases alternate in parity from 0, and the one before the first counts as complete.
using PhaseBarrier = uint64_t;
inline void init_barrier(PhaseBarrier* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
// Its memory may be initialized again.
inline void invalidate_barrier(PhaseBarrier* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
inline void arrive(PhaseBarrier* barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(
                   shared_address(barrier))
               : "memory");
}
inline void wait_for_phase(const PhaseBarrier* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
#else
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
#endif
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Four 8 x 8 matrices of 16 bits, transposed; lanes 8 m to 8 m + 7 name the rows of matrix m.
inline void ldmatrix_transposed(uint32_t (&a)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}
inline void ldmatrix_transposed(uint32_t (&a)[4], const void* row) {
  ldmatrix_transposed(a, shared_address(row));
}
inline void ldmatrix(uint32_t (&a)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}
// Absent bytes become zeros; `from` is not read then. The L2 fetches 128 bytes: scales alone are
// 64, and DRAM serves many such requests slowly.
template <uint32_t kBytes>
inline void copy_async(SharedAddress to, const void* from, bool present) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from),
                 "r"(present ? kBytes : 0), "n"(kBytes)
                 : "memory");
  }
}
inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t kLeft>
inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// As arrive(), when the copies that the thread has begun are there.
inline void arrive_when_copied(PhaseBarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies that one thread issues, by 16 bytes: the barrier's phase is complete when all bytes that
// were expected have come, too. The thread that arrives does so behind those that issue. What is
// read once leaves L2 first, so that code, page tables and queries stay. (With such a policy, some
// kernels that use cp.async end in CUDA_ERROR_ILLEGAL_INSTRUCTION.)
#if __CUDA_ARCH__ >= 900
inline uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
inline void arrive_expecting(PhaseBarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
inline void copy_bulk(SharedAddress to, uint64_t from, uint32_t bytes, PhaseBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(evict_first())
      : "memory");
}
#else
inline void arrive_expecting(PhaseBarrier*, uint32_t) { __trap(); }
inline void copy_bulk(SharedAddress, uint64_t, uint32_t, PhaseBarrier*) {}
#endif

// The blocks of a cluster run at the same time and store into each other's shared memory (DSMEM).
// An mbarrier there counts the bytes: a thread that waited for it sees them.
using TransactionBarrier = uint64_t;

#if __CUDA_ARCH__ >= 900

#define GYRE_CLUSTER(size) __cluster_dims__(size, 1, 1)
inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Called by one thread before it arrives at the cluster barrier; other blocks store after they
// waited there.
inline void expect_transactions(TransactionBarrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Called by all threads of a warp together.
inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores to the address in block `rank` that `local` is in this one, and completes its barrier.
inline void dsmem_store(float2 x, float* local, TransactionBarrier* barrier, uint32_t rank) {
  uint32_t to, counted;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(counted)
      : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(x.x), "f"(x.y), "r"(counted)
      : "memory");
}
inline void wait_for_transactions(const TransactionBarrier* barrier) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
  }
}

#else

// No clusters before sm_90: the planner never chooses a variant that needs them.
#define GYRE_CLUSTER(size)
inline uint32_t cluster_rank() { return 0; }
inline void expect_transactions(TransactionBarrier*, uint32_t) { __trap(); }
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline void dsmem_store(float2, float*, TransactionBarrier*, uint32_t) {}
inline void wait_for_transactions(const TransactionBarrier*) {}

#endif

// kCount neighbouring warps synchronize. Barrier 0 is __syncthreads.
template <uint32_t kCount>
inline void sync_named_barrier(uint32_t group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kCount * 32) : "memory");
}

}  // namespace gyre::cuda
