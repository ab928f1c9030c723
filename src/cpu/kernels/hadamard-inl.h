// The Walsh-Hadamard transform of a contiguous float array, in place, without the factor 1 /
// sqrt(n). A stage of step h makes every pair (a, b) at distance h (a + b, a - b); the stages
// come in the order 4, 8, ... n / 2, 1, 2. Each sum and difference is one f32 operation, so every
// target gives the same bits.

#if defined(GYRE_CPU_HADAMARD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_HADAMARD_INL_H
#undef GYRE_CPU_HADAMARD_INL_H
#else
#define GYRE_CPU_HADAMARD_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Four lanes: rows are short, and the last two stages are then a transpose of four vectors on every
// target.
using DHadamard = hn::CappedTag<float, 4>;
using VHadamard = hn::Vec<DHadamard>;

HWY_INLINE void Butterfly(VHadamard& a, VHadamard& b) {
  const auto sum = hn::Add(a, b);
  b = hn::Sub(a, b);
  a = sum;
}

// Stages h, 2h and 4h in one pass over memory. pair(i, a, b) gives the four coordinates from i on
// and the four from i + h on, after the stage h, from wherever they are.
template <class Pair>
HWY_INLINE void HadamardRadix8(const Pair& pair, float* HWY_RESTRICT y, size_t n, size_t h) {
  const DHadamard d;
  for (size_t base = 0; base < n; base += 8 * h) {
    for (size_t i = base; i < base + h; i += 4) {
      VHadamard v0, v1, v2, v3, v4, v5, v6, v7;
      pair(i, v0, v1), pair(i + 2 * h, v2, v3), pair(i + 4 * h, v4, v5), pair(i + 6 * h, v6, v7);
      Butterfly(v0, v2), Butterfly(v1, v3), Butterfly(v4, v6), Butterfly(v5, v7);
      Butterfly(v0, v4), Butterfly(v1, v5), Butterfly(v2, v6), Butterfly(v3, v7);
      float* const at = y + i;
      hn::Store(v0, d, at), hn::Store(v1, d, at + h);
      hn::Store(v2, d, at + 2 * h), hn::Store(v3, d, at + 3 * h);
      hn::Store(v4, d, at + 4 * h), hn::Store(v5, d, at + 5 * h);
      hn::Store(v6, d, at + 6 * h), hn::Store(v7, d, at + 7 * h);
    }
  }
}

HWY_INLINE void HadamardRadix4(float* HWY_RESTRICT y, size_t n, size_t h) {
  const DHadamard d;
  for (size_t base = 0; base < n; base += 4 * h) {
    for (float* at = y + base; at < y + base + h; at += 4) {
      auto v0 = hn::Load(d, at), v1 = hn::Load(d, at + h);
      auto v2 = hn::Load(d, at + 2 * h), v3 = hn::Load(d, at + 3 * h);
      Butterfly(v0, v1), Butterfly(v2, v3);
      Butterfly(v0, v2), Butterfly(v1, v3);
      hn::Store(v0, d, at), hn::Store(v1, d, at + h);
      hn::Store(v2, d, at + 2 * h), hn::Store(v3, d, at + 3 * h);
    }
  }
}

HWY_INLINE void HadamardRadix2(float* HWY_RESTRICT y, size_t n, size_t h) {
  const DHadamard d;
  for (size_t base = 0; base < n; base += 2 * h) {
    for (float* at = y + base; at < y + base + h; at += 4) {
      auto v0 = hn::Load(d, at), v1 = hn::Load(d, at + h);
      Butterfly(v0, v1);
      hn::Store(v0, d, at), hn::Store(v1, d, at + h);
    }
  }
}

// A pair for the stage h, from memory.
HWY_INLINE void LoadPair(const float* HWY_RESTRICT at, size_t h, VHadamard& a, VHadamard& b) {
  a = hn::Load(DHadamard(), at);
  b = hn::Load(DHadamard(), at + h);
  Butterfly(a, b);
}

// Stages 4 to `end`, not included, of a transform of n points, n at least 8. first(i, a, b) gives
// the eight coordinates from i on, after the stage 4.
template <class First>
HWY_INLINE void HadamardOuter(const First& first, float* HWY_RESTRICT y, size_t n, size_t end) {
  const DHadamard d;
  size_t h = 4;
  if (8 * h <= end) {
    HadamardRadix8(first, y, n, h);
    h *= 8;
  } else {
    for (size_t i = 0; i < n; i += 8) {
      VHadamard a, b;
      first(i, a, b);
      hn::Store(a, d, y + i), hn::Store(b, d, y + i + 4);
    }
    h *= 2;
  }
  const auto pair = [&](size_t i, VHadamard& a, VHadamard& b)
                        HWY_ATTR { LoadPair(y + i, h, a, b); };
  for (; 8 * h <= end; h *= 8) HadamardRadix8(pair, y, n, h);
  if (4 * h <= end) {
    HadamardRadix4(y, n, h);
    h *= 4;
  }
  if (2 * h <= end) HadamardRadix2(y, n, h);
}

// Lane l of vector k becomes lane k of vector l.
HWY_INLINE void Transpose4(VHadamard& v0, VHadamard& v1, VHadamard& v2, VHadamard& v3) {
  const DHadamard d;
  const auto a0 = hn::InterleaveLower(d, v0, v2), a1 = hn::InterleaveUpper(d, v0, v2);
  const auto a2 = hn::InterleaveLower(d, v1, v3), a3 = hn::InterleaveUpper(d, v1, v3);
  v0 = hn::InterleaveLower(d, a0, a2), v1 = hn::InterleaveUpper(d, a0, a2);
  v2 = hn::InterleaveLower(d, a1, a3), v3 = hn::InterleaveUpper(d, a1, a3);
}

// The last two stages of 16 coordinates; they come out transposed: coordinate 4 l + k in lane l of
// vector k.
HWY_INLINE void HadamardLast16(VHadamard& v0, VHadamard& v1, VHadamard& v2, VHadamard& v3) {
  Transpose4(v0, v1, v2, v3);
  Butterfly(v0, v1), Butterfly(v2, v3);
  Butterfly(v0, v2), Butterfly(v1, v3);
}

// The whole transform in natural order. y is aligned to a vector where n allows one.
HWY_INLINE void Hadamard(float* HWY_RESTRICT y, uint32_t n) {
  const DHadamard d;
  if (n >= 8) {
    const auto first = [&](size_t i, VHadamard& a, VHadamard& b)
                           HWY_ATTR { LoadPair(y + i, 4, a, b); };
    HadamardOuter(first, y, n, n);
  }
  if (n >= 16) {
    for (size_t i = 0; i < n; i += 16) {
      auto v0 = hn::Load(d, y + i), v1 = hn::Load(d, y + i + 4);
      auto v2 = hn::Load(d, y + i + 8), v3 = hn::Load(d, y + i + 12);
      HadamardLast16(v0, v1, v2, v3);
      Transpose4(v0, v1, v2, v3);
      hn::Store(v0, d, y + i), hn::Store(v1, d, y + i + 4);
      hn::Store(v2, d, y + i + 8), hn::Store(v3, d, y + i + 12);
    }
    return;
  }
  for (const uint32_t h : {1u, 2u}) {
    for (uint32_t j = 0; j < n && h < n; ++j) {
      if ((j & h) != 0) continue;
      const float a = y[j], b = y[j + h];
      y[j] = a + b;
      y[j + h] = a - b;
    }
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
