#pragma once
// f32, f16 and bf16. The bits are those of gyre/dtype.h: nearest, ties to even, one NaN for each
// narrow type; f16 to f32 keeps a NaN's sign and payload and makes it quiet.
#include "cuda/kernels/float16_instructions.cuh"
#include "cuda/kernels/words.cuh"

namespace gyre::cuda {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// NaN becomes any NaN: for arithmetic.
inline float widen(float value) { return value; }
inline float widen(Half value) { return widen_f16(value.bits); }
inline float widen(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

// NaN keeps its payload: for copies.
inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return widen(value); }
inline float to_float(Half value) {
  const uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude <= 0x7C00u) return widen(value);
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  return __uint_as_float(sign | 0x7FC00000u | (magnitude & 0x3FFu) << 13);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline Half from_float<Half>(float value) {
  const uint16_t bits = round_f16(value);
  const bool nan = (__float_as_uint(value) & 0x7FFFFFFFu) > 0x7F800000u;
  return {nan ? static_cast<uint16_t>(0x7E00) : bits};
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t pattern = __float_as_uint(value);
  const uint32_t rounded = (pattern + 0x7FFFu + (pattern >> 16 & 1u)) >> 16;
  const bool nan = (pattern & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(nan ? 0x7FC0u : rounded)};
}

// x as the sum of two 16-bit floats, for dot products with keys. `hi` is 0 only if x is: with an
// infinite key it gives what x would. `lo` may be 0, or have the other sign: see add_lo.
template <class T>
struct HiLo {
  T hi, lo;

  explicit HiLo(float x) : hi(from_float<T>(x)) {
    if (x != 0 && (hi.bits & 0x7FFFu) == 0) hi.bits |= 1;
    lo = from_float<T>(x - to_float(hi));
  }
};

// Within a type a copy of the bits: no NaN changes.
template <class To, class From>
struct Convert {
  static To value(From from) { return from_float<To>(to_float(from)); }
};

template <class T>
struct Convert<T, T> {
  static T value(T from) { return from; }
};

inline int ceil_to_int(float x) { return __float2int_ru(x); }

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

template <class A, class B>
inline constexpr bool is_same_type = false;
template <class A>
inline constexpr bool is_same_type<A, A> = true;

template <bool kFirst, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

// Elements that stay in the words they were loaded in. A pack that comes from one of two loads is
// kept element by element, in as many registers.
template <class T, uint32_t kCount>
struct Words {
  static constexpr uint32_t kWords = kCount * sizeof(T) / 4;
  alignas(kWords % 4 == 0 ? 16 : 4) uint32_t of[kWords];

  __device__ float element(uint32_t i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(of[i]);
    } else {
      return widen(T{static_cast<uint16_t>(of[i / 2] >> (16 * (i % 2)))});
    }
  }
};

// kCount elements from a multiple of 16 bytes on to words [first, ...).
template <uint32_t kCount, class T, uint32_t kAll>
__device__ void load_wide(const T* from, uint32_t first, Words<T, kAll>& words) {
#pragma unroll
  for (uint32_t i = 0; i < kCount * sizeof(T) / 16; ++i) {
    const uint4 four = reinterpret_cast<const uint4*>(from)[i];
    uint32_t* const to = words.of + first + 4 * i;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
}

// Two at a time, as from_float has them.
__device__ inline void from_floats(float low, float high, Half& to_low, Half& to_high) {
  const uint32_t pair = round_f16x2(low, high);
  to_low.bits = static_cast<uint16_t>(pair), to_high.bits = static_cast<uint16_t>(pair >> 16);
}
template <class T>
__device__ void from_floats(float low, float high, T& to_low, T& to_high) {
  to_low = from_float<T>(low), to_high = from_float<T>(high);
}

template <class T, uint32_t kCount>
__device__ Pack<T, kCount> pack_floats(const float (&x)[kCount]) {
  Pack<T, kCount> pack;
  if constexpr (kCount == 1) {
    pack.of[0] = from_float<T>(x[0]);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += 2)
      from_floats(x[i], x[i + 1], pack.of[i], pack.of[i + 1]);
  }
  return pack;
}

template <class T, uint32_t kCount>
__device__ void store_floats(const float (&x)[kCount], T* to) {
  store_pack(pack_floats<T>(x), to);
}

// From a multiple of 16 bytes on, or of 8 if they are not more.
template <class T, uint32_t kCount>
__device__ void store_wide(const float (&x)[kCount], T* to) {
  static_assert(kCount * sizeof(T) % 16 == 0 || kCount * sizeof(T) == 8);
  const Pack<T, kCount> pack = pack_floats<T>(x);
  if constexpr (sizeof(pack) == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(&pack);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(pack) / 16; ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&pack)[i];
  }
}

// Bit for bit within a type, one rounding between types.
template <class Source, class Target, uint32_t kCount>
__device__ void copy_elements(const Source* from, Target* to) {
  const Pack<Source, kCount> in = load_pack<Source, kCount>(from);
  Pack<Target, kCount> out;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) out.of[i] = Convert<Target, Source>::value(in.of[i]);
  store_pack(out, to);
}

// As copy_elements, from words to a multiple of 16 bytes.
template <class Source, class Target, uint32_t kCount>
__device__ void copy_wide(const Words<Source, kCount>& words, Target* to) {
  if constexpr (is_same_type<Source, Target>) {
#pragma unroll
    for (uint32_t i = 0; i < words.kWords / 4; ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(words.of)[i];
  } else {
    Pack<Target, kCount> out;
    const Pack<Source, kCount>& in = reinterpret_cast<const Pack<Source, kCount>&>(words);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) out.of[i] = Convert<Target, Source>::value(in.of[i]);
#pragma unroll
    for (uint32_t i = 0; i < sizeof(out) / 16; ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&out)[i];
  }
}

}  // namespace gyre::cuda
