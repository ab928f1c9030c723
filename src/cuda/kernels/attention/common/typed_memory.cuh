#pragma once
// Numbers in global memory whose dtype is known when the kernel runs.
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/instructions.cuh"

namespace gyre::cuda {

// dtypes are those of gyre/dtype.h: f32, f16, bf16. Selects instead of branches: a branch would
// wait for the load.
inline float as_float(uint32_t bits, uint32_t dtype) {
  const float f16 = widen(Half{static_cast<uint16_t>(bits)});
  const float bf16 = widen(BFloat16{static_cast<uint16_t>(bits)});
  return dtype == 0 ? __uint_as_float(bits) : (dtype == 1 ? f16 : bf16);
}
inline float load_as_float(uint64_t row, uint32_t dtype, uint32_t index) {
  return as_float(load_bits(row, index, dtype == 0), dtype);
}
inline void store_float(uint64_t row, uint32_t dtype, uint32_t index, float value) {
  if (dtype == 0) {
    reinterpret_cast<float*>(row)[index] = value;
  } else if (dtype == 1) {
    reinterpret_cast<Half*>(row)[index] = from_float<Half>(value);
  } else {
    reinterpret_cast<BFloat16*>(row)[index] = from_float<BFloat16>(value);
  }
}
// Elements kApart from each other: one branch for all of them.
template <uint32_t kCount, uint32_t kApart>
inline void store_floats(uint64_t row, uint32_t dtype, uint32_t index, const float (&x)[kCount]) {
  if (dtype == 0) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) pointer<float>(row)[index + i * kApart] = x[i];
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint16_t f16 = from_float<Half>(x[i]).bits, bf16 = from_float<BFloat16>(x[i]).bits;
    pointer<uint16_t>(row)[index + i * kApart] = dtype == 1 ? f16 : bf16;
  }
}

}  // namespace gyre::cuda
