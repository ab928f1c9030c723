#pragma once
// Metal's vectors and half, as far as kernels use them.

namespace metal {

#if defined(GYRE_METAL_CHECK)  // a class in another address space cannot be copied from there
template <class T>
using vec2 = T __attribute__((ext_vector_type(2)));
template <class T>
using vec3 = T __attribute__((ext_vector_type(3)));
template <class T>
using vec4 = T __attribute__((ext_vector_type(4)));
#else
template <class T>
struct alignas(2 * sizeof(T)) vec2 {
  T x, y;
};
template <class T>
struct alignas(4 * sizeof(T)) vec3 {
  T x, y, z;
};
template <class T>
struct alignas(4 * sizeof(T)) vec4 {
  T x, y, z, w;
};
#endif

template <class To, class From>
To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &value, sizeof(to));
  return to;
}

// 16 bits in memory; arithmetic is done in float.
struct half {
  uint16_t bits = 0;

  half() = default;
  half(float value) : bits(rounded(value)) {}
  operator float() const { return widened(bits); }

  static uint16_t rounded(float value) {
    const auto x = as_type<uint32_t>(value);
    const uint32_t sign = x >> 16 & 0x8000, a = x & 0x7FFFFFFF;
    if (a > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (a >> 13 & 0x3FF));
    if (a >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);
    if (a < 0x38800000) {  // the sum has units of 2^-24, as subnormals do
      const float sum = as_type<float>(a) + 0.5f;
      return static_cast<uint16_t>(sign | (as_type<uint32_t>(sum) - 0x3F000000));
    }
    return static_cast<uint16_t>(sign | (a + 0xFFF + (a >> 13 & 1) - 0x38000000) >> 13);
  }
  static float widened(uint16_t h) {
    const uint32_t sign = uint32_t{h} >> 15 << 31, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 0) {
      const float value = static_cast<float>(mantissa) * 0x1p-24f;
      return as_type<float>(sign | as_type<uint32_t>(value));
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return as_type<float>(sign | wide << 23 | mantissa << 13);
  }
};

using uint2 = vec2<uint>;
using ulong2 = vec2<ulong>;
using uint3 = vec3<uint>;
using uint4 = vec4<uint>;
using float2 = vec2<float>;
using float4 = vec4<float>;

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}

}  // namespace metal
