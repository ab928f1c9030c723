#pragma once
// Runs CUDA kernels' text on the host, a fiber for each thread of a block: slow, but exact about
// what synchronises with what, so that kernels' logic is tested where there is no GPU. Blocks run
// one after another; every lane of a warp must take part in its shuffles. A kernel's text sees
// GYRE_CUDA_HOST and brings host versions of what it writes in PTX.
#define GYRE_CUDA_HOST 1

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 {
  unsigned int x = 0, y = 0, z = 0;
};
struct dim3 : uint3 {
  dim3(unsigned int a = 1, unsigned int b = 1, unsigned int c = 1) : uint3{a, b, c} {}
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace gyre::cuda_host {

constexpr unsigned int kWarp = 32;

struct Barrier {
  unsigned int waiting = 0, alive = 0;
  uint64_t generation = 0;
};

// A context starts a fiber; from then on jumps switch, which cost no system call.
struct Fiber {
  ucontext_t context{};
  jmp_buf at{};
  bool started = false;
  unsigned int thread = 0;
  bool done = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<uint64_t> exchange;                 // a lane's value, while its warp shuffles
  std::vector<std::array<uint64_t, 8>> operands;  // a lane's, while its warp multiplies
  std::vector<unsigned char> shared;
  Barrier all;
  jmp_buf scheduler{};
  Fiber* running = nullptr;
  std::function<void()> body;
};

inline Block* block = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;  // one a thread, kept from block to block

inline void yield() {
  if (_setjmp(block->running->at) == 0) _longjmp(block->scheduler, 1);
}

[[gnu::noinline]] inline void resume(Fiber& fiber) {
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline void release_if_full(Barrier& barrier) {
  if (barrier.waiting == 0 || barrier.waiting != barrier.alive) return;
  barrier.waiting = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  const uint64_t generation = barrier.generation;
  ++barrier.waiting;
  release_if_full(barrier);
  while (barrier.generation == generation) yield();
}

inline unsigned int lane() { return block->running->thread % kWarp; }
inline Barrier& warp() { return block->warps[block->running->thread / kWarp]; }

inline uint64_t exchanged(uint64_t value, unsigned int source) {
  uint64_t* const slots = &block->exchange[block->running->thread / kWarp * kWarp];
  slots[lane()] = value;
  wait(warp());
  const uint64_t got = slots[source % kWarp];
  wait(warp());
  return got;
}

template <class T>
T shuffle(T value, unsigned int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchanged(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline void run_fiber() {
  Fiber& fiber = *block->running;
  block->body();
  fiber.done = true;
  --block->all.alive;
  --warp().alive;
  release_if_full(block->all);
  release_if_full(warp());
  yield();
}

inline void run_block(unsigned int threads) {
  constexpr size_t kStack = 256 << 10;
  Block& b = *block;
  b.fibers = std::vector<Fiber>(threads);
  b.warps.assign((threads + kWarp - 1) / kWarp, {});
  b.exchange.assign(b.warps.size() * kWarp, 0);
  b.operands.assign(b.warps.size() * kWarp, {});
  b.all = {0, threads, 0};
  for (unsigned int i = 0; i < threads; ++i) {
    Fiber& fiber = b.fibers[i];
    fiber.thread = i;
    if (stacks.size() <= i) stacks.push_back(std::make_unique_for_overwrite<char[]>(kStack));
    ++b.warps[i / kWarp].alive;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (Fiber& fiber : b.fibers) {
      if (fiber.done) continue;
      busy = true;
      b.running = &fiber;
      threadIdx = {fiber.thread, 0, 0};
      resume(fiber);
    }
  }
}

// kernel<<<grid, threads, shared_bytes>>>(arguments...)
template <class Kernel, class... Arguments>
void launch(const dim3& grid, unsigned int threads, size_t shared_bytes, const Kernel& kernel,
            const Arguments&... arguments) {
  Block made;
  made.shared.resize(shared_bytes + 128);
  made.body = [&] { kernel(arguments...); };
  block = &made;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned int z = 0; z < grid.z; ++z) {
    for (unsigned int y = 0; y < grid.y; ++y) {
      for (unsigned int x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::fill(made.shared.begin(), made.shared.end(), 0xAB);  // what nobody wrote shows
        run_block(threads);
      }
    }
  }
  block = nullptr;
}

// 128-byte aligned, as the device's version.
inline unsigned char* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(block->shared.data());
  return block->shared.data() + ((address + 127) / 128 * 128 - address);
}
inline uint32_t dynamic_shared_bytes() { return static_cast<uint32_t>(block->shared.size()) - 128; }

// Every lane puts down its operands, then each computes from those of all.
template <class Compute>
void with_operands(const std::array<uint64_t, 8>& mine, const Compute& compute) {
  std::array<uint64_t, 8>* const lanes = &block->operands[block->running->thread / kWarp * kWarp];
  lanes[lane()] = mine;
  wait(warp());
  compute(lanes);
  wait(warp());
}

// The fragments of mma.m16n8k16 (16-bit floats) and mma.m16n8k32 (int8): of A four words, of B two.
template <class Wide>
void mma16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Wide& wide) {
  with_operands({a[0], a[1], a[2], a[3], b0, b1}, [&](const auto* lanes) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      for (uint32_t k = 0; k < 16; ++k) {
        const uint64_t x = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        const uint64_t y = lanes[column * 4 + k % 8 / 2][4 + k / 8];
        c[i] += wide(static_cast<uint16_t>(x >> (k % 2 * 16))) *
                wide(static_cast<uint16_t>(y >> (k % 2 * 16)));
      }
    }
  });
}
template <class B = int8_t>
void mma8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  with_operands({a[0], a[1], a[2], a[3], b0, b1}, [&](const auto* lanes) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      for (uint32_t k = 0; k < 32; ++k) {
        const uint64_t x = lanes[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
        const uint64_t y = lanes[column * 4 + k % 16 / 4][4 + k / 16];
        c[i] += static_cast<int8_t>(x >> (k % 4 * 8)) * static_cast<B>(y >> (k % 4 * 8));
      }
    }
  });
}
// ldmatrix.x4.trans: lane l names row l % 8 of matrix l / 8.
inline void ldmatrix(uint32_t (&a)[4], const void* row) {
  with_operands({reinterpret_cast<uint64_t>(row)}, [&](const auto* lanes) {
    for (uint32_t m = 0; m < 4; ++m) {
      a[m] = 0;
      for (uint32_t e = 0; e < 2; ++e) {
        const auto* const from =
            reinterpret_cast<const uint16_t*>(lanes[m * 8 + lane() % 4 * 2 + e][0]);
        a[m] |= static_cast<uint32_t>(from[lane() / 4]) << (16 * e);
      }
    }
  });
}

}  // namespace gyre::cuda_host

inline void __syncthreads() { gyre::cuda_host::wait(gyre::cuda_host::block->all); }
inline void __syncwarp(unsigned int = ~0u) { gyre::cuda_host::wait(gyre::cuda_host::warp()); }
template <class T>
T __shfl_sync(unsigned int, T value, int source, int = 32) {
  return gyre::cuda_host::shuffle(value, static_cast<unsigned int>(source));
}
template <class T>
T __shfl_xor_sync(unsigned int, T value, int mask, int = 32) {
  return gyre::cuda_host::shuffle(value, gyre::cuda_host::lane() ^ static_cast<unsigned int>(mask));
}
template <class T>
T __shfl_down_sync(unsigned int, T value, unsigned int by, int = 32) {
  const unsigned int lane = gyre::cuda_host::lane();
  return gyre::cuda_host::shuffle(value, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned int, T value, unsigned int by, int = 32) {
  const unsigned int lane = gyre::cuda_host::lane();
  return gyre::cuda_host::shuffle(value, lane >= by ? lane - by : lane);
}
inline unsigned int __ballot_sync(unsigned int, int predicate) {
  unsigned int mine = predicate != 0 ? 1u << gyre::cuda_host::lane() : 0u;
  for (int by = 1; by < 32; by *= 2) mine |= __shfl_xor_sync(~0u, mine, by);
  return mine;
}
inline int __any_sync(unsigned int mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned int mask, int predicate) {
  return __ballot_sync(mask, predicate) == ~0u;
}
template <class T>
T atomicAdd(T* place, T value) {
  const T old = *place;
  *place = static_cast<T>(old + value);
  return old;
}
inline unsigned int atomicOr(unsigned int* place, unsigned int value) {
  const unsigned int old = *place;
  *place |= value;
  return old;
}
inline void __threadfence() {}
template <class T>
T __ldg(const T* place) {
  return *place;
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>(uint64_t{a} * b >> 32);
}
inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __saturatef(float a) { return a > 0.0f ? std::min(a, 1.0f) : 0.0f; }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __popc(unsigned int x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned int>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned int>(x)); }
inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int select) {
  const uint64_t both = a | uint64_t{b} << 32;
  unsigned int out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int nibble = select >> (4 * i) & 15;
    auto byte = static_cast<unsigned int>(both >> (8 * (nibble & 7)) & 255);
    if ((nibble & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int>(static_cast<int8_t>(a >> (8 * i))) * static_cast<int8_t>(b >> (8 * i));
  return c;
}
using std::max;
using std::min;
