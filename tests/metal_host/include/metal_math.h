#pragma once
// Metal's arithmetic, exact where Metal promises it without fast math.

namespace metal {

template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
// NaN is no number: the other one is.
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
template <class T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
T select(T a, T b, bool second) {
  return second ? b : a;
}
inline int abs(int x) { return x < 0 ? -x : x; }
inline float abs(float x) { return std::fabs(x); }
inline float fabs(float x) { return std::fabs(x); }
inline float copysign(float x, float sign) { return std::copysign(x, sign); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float rint(float x) { return std::rint(x); }
inline float floor(float x) { return std::floor(x); }
inline float ceil(float x) { return std::ceil(x); }
inline float trunc(float x) { return std::trunc(x); }
inline float ldexp(float x, int exponent) { return std::ldexp(x, exponent); }
inline bool isnan(float x) { return std::isnan(x); }
inline bool isinf(float x) { return std::isinf(x); }
inline bool isfinite(float x) { return std::isfinite(x); }
inline uint popcount(uint x) { return static_cast<uint>(__builtin_popcount(x)); }
inline uint clz(uint x) { return x == 0 ? 32 : static_cast<uint>(__builtin_clz(x)); }
inline uint clz(ulong x) { return x == 0 ? 64 : static_cast<uint>(__builtin_clzl(x)); }

namespace precise {
inline float sqrt(float x) { return std::sqrt(x); }
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float log(float x) { return std::log(x); }
inline float log2(float x) { return std::log2(x); }
inline float sin(float x) { return std::sin(x); }
inline float cos(float x) { return std::cos(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float pow(float x, float y) { return std::pow(x, y); }
}  // namespace precise

}  // namespace metal
