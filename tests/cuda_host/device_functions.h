#pragma once
// CUDA's device functions for kernels' text on the host; cuda_host.h includes them at its end.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda_host.h"

namespace gyre::cuda_host {

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
// ldmatrix.x4, transposed or not: lane l names row l % 8 of matrix l / 8.
template <bool kTransposed>
void ldmatrix(uint32_t (&a)[4], const void* row) {
  with_operands({reinterpret_cast<uint64_t>(row)}, [&](const auto* lanes) {
    for (uint32_t m = 0; m < 4; ++m) {
      a[m] = 0;
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t pair = lane() % 4 * 2 + e, eighth = lane() / 4;
        const auto* const from =
            reinterpret_cast<const uint16_t*>(lanes[m * 8 + (kTransposed ? pair : eighth)][0]);
        a[m] |= static_cast<uint32_t>(from[kTransposed ? eighth : pair]) << (16 * e);
      }
    }
  });
  wait(warp());  // all lanes have read: what was there may go
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
T __shfl_up_sync(unsigned int, T value, unsigned int by, int = 32) {
  const unsigned int lane = gyre::cuda_host::lane();
  return gyre::cuda_host::shuffle(value, lane >= by ? lane - by : lane);
}
inline unsigned int __ballot_sync(unsigned int, int predicate) {
  unsigned int mine = predicate != 0 ? 1u << gyre::cuda_host::lane() : 0u;
  for (int by = 1; by < 32; by *= 2) mine |= __shfl_xor_sync(~0u, mine, by);
  return mine;
}
inline unsigned int __reduce_max_sync(unsigned int, unsigned int x) {
  for (int by = 1; by < 32; by *= 2) x = std::max(x, __shfl_xor_sync(~0u, x, by));
  return x;
}
inline unsigned int __reduce_or_sync(unsigned int, unsigned int x) {
  for (int by = 1; by < 32; by *= 2) x |= __shfl_xor_sync(~0u, x, by);
  return x;
}
inline int __reduce_add_sync(unsigned int, int x) {
  for (int by = 1; by < 32; by *= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
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
inline unsigned int atomicXor(unsigned int* place, unsigned int value) {
  const unsigned int before = *place;
  *place = before ^ value;
  return before;
}
inline unsigned int atomicMin(unsigned int* place, unsigned int value) {
  const unsigned int before = *place;
  *place = std::min(before, value);
  return before;
}
inline unsigned int atomicMax(unsigned int* place, unsigned int value) {
  const unsigned int before = *place;
  *place = std::max(before, value);
  return before;
}
inline unsigned int atomicOr(unsigned int* place, unsigned int value) {
  const unsigned int old = *place;
  *place |= value;
  return old;
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>(uint64_t{a} * b >> 32);
}
inline unsigned int __float_as_uint(float x) { return std::bit_cast<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rz(float a, float b) {
  const double sum = double{a} + b;
  const auto near = static_cast<float>(sum);
  return std::abs(double{near}) > std::abs(sum) ? std::nextafter(near, 0.0f) : near;
}
inline float __fadd_ru(float a, float b) {
  const float sum = a + b, rest = sum - a;
  const float error = (a - (sum - rest)) + (b - rest);  // exact
  return error > 0 ? std::nextafter(sum, INFINITY) : sum;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __saturatef(float a) { return a > 0.0f ? std::min(a, 1.0f) : 0.0f; }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __float2int_ru(float a) { return static_cast<int>(std::ceil(a)); }
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
#if !defined(__clang__)
#define __builtin_assume(what)
#endif
using std::max;
using std::min;
