#pragma once
// Levels, codes and sums of calibrated rows (docs/kv_formats.md, "Calibrated rows"), and what a
// calibration says about a head.
#include "cuda/kernels/encode.cuh"
#include "cuda/kernels/global_memory.cuh"

namespace gyre::cuda {

constexpr uint32_t kEncodeArgs = 7;  // addresses of a stream

// What one head's rows are calibrated with; null: not given.
struct HeadCalibration {
  const float* matrix;
  const float* inverse;
  const float* mean;
  const float* factor;
  const float* diagonal;

  // at: the stream's addresses
  __device__ HeadCalibration(const uint64_t* at, uint64_t n, uint64_t head)
      : matrix(of_head(at[1], head * n * n)),
        inverse(of_head(at[2], head * n * n)),
        mean(of_head(at[3], head * n)),
        factor(of_head(at[4], head * n * n)),
        diagonal(of_head(at[5], head * n)) {}

 private:
  __device__ static const float* of_head(uint64_t address, uint64_t offset) {
    return address != 0 ? pointer<const float>(address) + offset : nullptr;
  }
};

// Twice the magnitude nearest to v, of kCount from kFirst on. Every comparison is of v itself: the
// selects behind them are few in a row, and a chain of coordinates waits for them.
template <uint32_t kFormat, uint32_t kFirst, uint32_t kCount>
__device__ float doubled_magnitude(float v) {
  if constexpr (kCount == 1) {
    return static_cast<float>(2 * abi::kv_magnitude(kFormat, kFirst));
  } else {
    constexpr uint32_t kUpper = kFirst + kCount / 2;
    constexpr auto kMiddle = static_cast<float>(abi::kv_magnitude(kFormat, kUpper - 1) +
                                                abi::kv_magnitude(kFormat, kUpper));
    const float above = doubled_magnitude<kFormat, kUpper, kCount / 2>(v);
    const float below = doubled_magnitude<kFormat, kFirst, kCount / 2>(v);
    return v > kMiddle ? above : below;
  }
}

// For formats without magnitudes: the integer that t is rounded up to, clamped first, so that
// nothing is too large for the sum with 1.5 * 2^23.
template <uint32_t kFormat>
__device__ float clamped_near(float t) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  constexpr float kUpper = kBits == 8 ? 127.0f : static_cast<float>(1u << (kBits - 1));
  constexpr float kLeast = kBits == 8 ? -127.0f : 1.0f - kUpper;
  return ceil_near(fminf(fmaxf(kBits == 8 ? t - 0.5f : t, kLeast), kUpper));
}

// The level of t in t's unit: twice the magnitude, half the odd integer, the byte.
template <uint32_t kFormat>
__device__ float level_of(float t) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    return copysignf(doubled_magnitude<kFormat, 0, 1u << (kBits - 1)>(fabsf(t)), t);
  } else {
    const float whole = clamped_near<kFormat>(t) - 0x1.8p23f;
    return kBits == 8 ? whole : whole - 0.5f;
  }
}
template <uint32_t kFormat>
inline constexpr float kLevelUnit = abi::kv_has_magnitudes(kFormat)
                                        ? 2.0f
                                        : (abi::kv_bits(kFormat) == 8 ? 1.0f : 0.5f);

template <uint32_t kFormat>
__device__ uint32_t code_of(float t) {
  constexpr uint32_t kBits = abi::kv_bits(kFormat), kUpper = 1u << (kBits - 1);
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    const uint32_t sign = __float_as_uint(t) >> 31;
    return (magnitude_index<kBits>(fabsf(t)) >> 16 & 0xFFu) | sign << (kBits - 1);
  } else {
    const uint32_t whole = __float_as_uint(clamped_near<kFormat>(t));
    return (kBits == 8 ? whole : whole + kUpper - 1) & 0xFFu;
  }
}

// Step 8's bits. n: coordinates of the row.
template <uint32_t kFormat>
__device__ uint32_t calibrated_scale(float ratio, uint32_t n, float power) {
  const float root = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(n)));
  return scale_bits(ratio * kLevelUnit<kFormat> * root * 0x1p31f * power);
}

__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7FFFFFFFu) < 0x7F800000u;
}

// The sum of 32 chains, one to a lane; every lane of the warp gets it.
__device__ inline float add_chains(float chain) {
#pragma unroll
  for (int half = 16; half != 0; half /= 2) chain = chain + __shfl_xor_sync(kAllLanes, chain, half);
  return chain;
}

// The sum of v w.
__device__ inline float sum_products(const float* v, const float* w, uint32_t n) {
  float chain = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x & 31; i < n; i += 32) chain = __fmaf_rn(v[i], w[i], chain);
  return add_chains(chain);
}

__device__ inline float largest_magnitude(const float* z, uint32_t n) {
  uint32_t largest = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x & 31; i < n; i += 32)
    largest = larger_of(largest, __float_as_uint(z[i]) & 0x7FFFFFFFu);
  return __uint_as_float(__reduce_max_sync(kAllLanes, largest));
}

// factor of step 4, from z and the sum of its squares.
template <uint32_t kFormat>
__device__ float calibration_factor(float sum, const float* z, uint32_t n) {
  float root;
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    root = __fsqrt_rn(sum * (1.0f / static_cast<float>(n)));
  } else {
    root = largest_magnitude(z, n);
  }
  return __fdiv_rn(abi::kv_codec(kFormat).gain, root);
}

}  // namespace gyre::cuda
