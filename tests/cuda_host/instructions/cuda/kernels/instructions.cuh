#pragma once
// src/cuda/kernels/instructions.cuh on fibers.
#include "cuda/kernels/block_shared.cuh"
#include "cuda/kernels/convert.cuh"

namespace gyre::cuda {

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma16(c, a, b0, b1, [](uint16_t bits) { return to_float(Half{bits}); });
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma16(c, a, b0, b1, [](uint16_t bits) { return to_float(BFloat16{bits}); });
}
inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma8(c, a, b0, b1);
}
inline void mma_s8_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_host::mma8<uint8_t>(c, a, b0, b1);
}
inline SharedAddress optimization_barrier(SharedAddress x) { return x; }
inline float fma_weighted(float x, float weight, float sum) {
  return weight != 0 ? std::fma(x, weight, sum) : sum;
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  return __byte_perm(a, b, select);
}
inline uint32_t rotate_right(uint32_t x, uint32_t by) {
  return x >> (by & 31u) | x << ((32u - by) & 31u);
}
inline uint32_t upper_half(uint32_t x) { return x >> 16; }
inline uint32_t inverted_lower(uint32_t x) { return ~0u - (x & 0xFFFFu); }
inline uint32_t inverted_upper(uint32_t x) { return ~0u - (x >> 16); }
inline uint32_t optimization_barrier(uint32_t x) { return x; }
inline uint32_t pin(uint32_t x) { return x; }
inline uint32_t code_motion_barrier(uint32_t x) { return x; }
inline uint64_t code_motion_barrier(uint64_t x) { return x; }
inline void trap() { cuda_host::fail("a kernel halted"); }
inline uint32_t atomic_add_acq_rel(uint64_t address, uint32_t x) {
  cuda_host::require_pdl_wait();
  auto* const counter = reinterpret_cast<uint32_t*>(address);
  const uint32_t before = *counter;
  *counter += x;
  return before;
}
inline uint32_t load_bits(uint64_t row, uint32_t index, bool wide) {
  cuda_host::require_pdl_wait();
  return wide ? reinterpret_cast<const uint32_t*>(row)[index]
              : reinterpret_cast<const uint16_t*>(row)[index];
}
template <class T>
inline T load_l2(uint64_t from) {
  cuda_host::require_pdl_wait();
  return *reinterpret_cast<const T*>(from);
}
// Subnormal results are 0, as on the device.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(x)); }
inline float divide_fast(float a, float b) { return a / b; }
// Two f16 less two others, where the differences are integers.
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  const auto one = [](uint32_t x, uint32_t y) -> uint32_t {
    return from_float<Half>(to_float(Half{static_cast<uint16_t>(x)}) -
                            to_float(Half{static_cast<uint16_t>(y)}))
        .bits;
  };
  return one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16;
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  const auto one = [](uint32_t x, uint32_t y) -> uint32_t {
    return from_float<Half>(to_float(Half{static_cast<uint16_t>(x)}) *
                            to_float(Half{static_cast<uint16_t>(y)}))
        .bits;
  };
  return one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16;
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0xFFFFu, b & 0xFFFFu);
  return std::max(a >> 16, b >> 16) << 16 | low;
}

}  // namespace gyre::cuda
