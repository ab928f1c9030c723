#pragma once
// f32, f16 and bf16 in memory as f32 in registers: exact on the way in, one rounding on the way
// out, with the bits that Half and BFloat16 of gyre/dtype.h have.
#include "abi/types.h"

namespace gyre::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

#if defined(GYRE_CUDA_HOST)
inline float half_to_float(uint32_t bits) {
  return static_cast<float>(gyre::Half::from_bits(static_cast<uint16_t>(bits)));
}
inline uint32_t float_to_half(float x) { return gyre::Half(x).bits; }
inline uint32_t float_to_bfloat16(float x) { return gyre::BFloat16(x).bits; }
inline int ceil_to_int(float x) { return static_cast<int>(std::ceil(x)); }
#else
__device__ inline float half_to_float(uint32_t bits) {
  float x;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }"
      : "=f"(x)
      : "h"(static_cast<uint16_t>(bits)));
  return x;
}
__device__ inline uint32_t float_to_half(float x) {
  uint16_t bits;
  asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(x));
  return x == x ? bits : 0x7E00u;
}
__device__ inline uint32_t float_to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x == x ? (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16 : 0x7FC0u;
}
__device__ inline int ceil_to_int(float x) { return __float2int_ru(x); }
#endif

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Half x) { return half_to_float(x.bits); }
__device__ inline float widen(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

// As widen, with the payload of a NaN kept: for copies.
template <class T>
__device__ float widen_exactly(T x) {
  return widen(x);
}
template <>
__device__ inline float widen_exactly(Half x) {
  const uint32_t magnitude = x.bits & 0x7FFFu;
  if (magnitude <= 0x7C00u) return widen(x);
  return __uint_as_float(static_cast<uint32_t>(x.bits & 0x8000) << 16 | 0x7FC00000u |
                         magnitude << 13);
}

__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, Half& to) {
  to.bits = static_cast<uint16_t>(float_to_half(x));
}
__device__ inline void narrow(float x, BFloat16& to) {
  to.bits = static_cast<uint16_t>(float_to_bfloat16(x));
}

__device__ inline bool is_aligned(const void* at, uint32_t bytes) {
  return (reinterpret_cast<uint64_t>(at) & (bytes - 1)) == 0;
}

// kCount elements as they lie in memory, by words where they are aligned.
template <class T, uint32_t kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  static constexpr uint32_t kWords = kCount * sizeof(T) / 4;
  T of[kCount];
};

template <class T, uint32_t kCount>
__device__ Pack<T, kCount> load_pack(const T* from) {
  Pack<T, kCount> pack;
  if (is_aligned(from, alignof(Pack<T, kCount>))) {
    if constexpr (sizeof(pack) >= 16) {
      const auto* const words = reinterpret_cast<const uint4*>(from);
#pragma unroll
      for (uint32_t i = 0; i < sizeof(pack) / 16; ++i)
        reinterpret_cast<uint4*>(&pack)[i] = words[i];
    } else {
      pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) pack.of[i] = from[i];
  }
  return pack;
}

template <class T, uint32_t kCount>
__device__ void store_pack(const Pack<T, kCount>& pack, T* to) {
  if (is_aligned(to, alignof(Pack<T, kCount>))) {
    if constexpr (sizeof(pack) >= 16) {
      auto* const words = reinterpret_cast<uint4*>(to);
#pragma unroll
      for (uint32_t i = 0; i < sizeof(pack) / 16; ++i)
        words[i] = reinterpret_cast<const uint4*>(&pack)[i];
    } else {
      *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) to[i] = pack.of[i];
  }
}

template <class T, uint32_t kCount>
__device__ void load_floats(const T* from, float (&x)[kCount]) {
  const Pack<T, kCount> pack = load_pack<T, kCount>(from);
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) x[i] = widen(pack.of[i]);
}

template <class T, uint32_t kCount>
__device__ void store_floats(const float (&x)[kCount], T* to) {
  Pack<T, kCount> pack;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) narrow(x[i], pack.of[i]);
  store_pack(pack, to);
}

template <class A, class B>
inline constexpr bool kSameType = false;
template <class A>
inline constexpr bool kSameType<A, A> = true;

// Bit for bit within a type, one rounding between types.
template <class Source, class Target, uint32_t kCount>
__device__ void copy_elements(const Source* from, Target* to) {
  const Pack<Source, kCount> in = load_pack<Source, kCount>(from);
  Pack<Target, kCount> out;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    if constexpr (kSameType<Source, Target>) {
      out.of[i] = in.of[i];
    } else {
      narrow(widen_exactly(in.of[i]), out.of[i]);
    }
  }
  store_pack(out, to);
}

}  // namespace gyre::cuda
