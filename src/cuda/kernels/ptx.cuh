#pragma once
// What kernels make of the instructions without a C++ name.
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/instructions.cuh"

namespace gyre::cuda {

inline uint32_t atomic_add_acq_rel(uint32_t* counter, uint32_t x = 1) {
  return atomic_add_acq_rel(reinterpret_cast<uint64_t>(counter), x);
}
template <class T>
inline T load_l2(const T* from) {
  return load_l2<T>(reinterpret_cast<uint64_t>(from));
}

template <class T>
inline T* pin(T* pointer) {
  const auto bits = reinterpret_cast<uint64_t>(pointer);
  return reinterpret_cast<T*>(uint64_t{pin(static_cast<uint32_t>(bits))} |
                              uint64_t{pin(static_cast<uint32_t>(bits >> 32))} << 32);
}

// What a 16-bit cache holds, by its KvFormat.
template <uint32_t kFormat>
struct Float16Type {
  using type = Half;
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_f16(c, a, b0, b1);
  }
};
template <>
struct Float16Type<2> {
  using type = BFloat16;
  static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16(c, a, b0, b1);
  }
};

}  // namespace gyre::cuda
