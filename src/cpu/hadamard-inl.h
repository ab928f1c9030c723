// The Walsh-Hadamard transform of a contiguous float array, in place, without the factor 1 / sqrt(n):
//   for h = 1, 2, 4, ... n / 2: every pair (a, b) at distance h becomes (a + b, a - b)
// Each sum and difference is one f32 operation, so every target gives the same bits.

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

// Eight lanes at most: wider vectors would need more kinds of shuffles and gain nothing on rows this short.
using DHadamard = hn::CappedTag<float, 8>;

// The stages within a vector.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V HadamardInLane(D d, V x) {
  auto swapped = hn::Reverse2(d, x);
  x = hn::OddEven(hn::Sub(swapped, x), hn::Add(x, swapped));
  if (hn::Lanes(d) >= 4) {
    const hn::Repartition<uint64_t, D> d64;
    swapped = hn::Shuffle1032(x);
    x = hn::BitCast(d, hn::OddEven(hn::BitCast(d64, hn::Sub(swapped, x)),
                                   hn::BitCast(d64, hn::Add(x, swapped))));
  }
#if HWY_CAP_GE256
  if (hn::Lanes(d) >= 8) {
    swapped = hn::SwapAdjacentBlocks(x);
    x = hn::OddEvenBlocks(hn::Sub(swapped, x), hn::Add(x, swapped));
  }
#endif
  return x;
}

template <class V>
HWY_INLINE void Butterfly(V& a, V& b) {
  const V sum = hn::Add(a, b);
  b = hn::Sub(a, b);
  a = sum;
}

// Stages h, 2h and 4h in one pass over memory; kFirst: with the stages within vectors before them.
template <bool kFirst, class D>
HWY_INLINE void HadamardRadix8(D d, float* HWY_RESTRICT y, uint32_t n, uint32_t h) {
  for (uint32_t base = 0; base < n; base += 8 * h) {
    for (uint32_t j = base; j < base + h; j += static_cast<uint32_t>(hn::Lanes(d))) {
      const auto load = [&](uint32_t k) HWY_ATTR {
        const auto v = hn::LoadU(d, y + j + k * h);
        return kFirst ? HadamardInLane(d, v) : v;
      };
      auto v0 = load(0), v1 = load(1), v2 = load(2), v3 = load(3);
      auto v4 = load(4), v5 = load(5), v6 = load(6), v7 = load(7);
      Butterfly(v0, v1), Butterfly(v2, v3), Butterfly(v4, v5), Butterfly(v6, v7);
      Butterfly(v0, v2), Butterfly(v1, v3), Butterfly(v4, v6), Butterfly(v5, v7);
      Butterfly(v0, v4), Butterfly(v1, v5), Butterfly(v2, v6), Butterfly(v3, v7);
      hn::StoreU(v0, d, y + j), hn::StoreU(v1, d, y + j + h);
      hn::StoreU(v2, d, y + j + 2 * h), hn::StoreU(v3, d, y + j + 3 * h);
      hn::StoreU(v4, d, y + j + 4 * h), hn::StoreU(v5, d, y + j + 5 * h);
      hn::StoreU(v6, d, y + j + 6 * h), hn::StoreU(v7, d, y + j + 7 * h);
    }
  }
}

template <class D>
HWY_INLINE void HadamardRadix4(D d, float* HWY_RESTRICT y, uint32_t n, uint32_t h) {
  for (uint32_t base = 0; base < n; base += 4 * h) {
    for (uint32_t j = base; j < base + h; j += static_cast<uint32_t>(hn::Lanes(d))) {
      auto v0 = hn::LoadU(d, y + j), v1 = hn::LoadU(d, y + j + h);
      auto v2 = hn::LoadU(d, y + j + 2 * h), v3 = hn::LoadU(d, y + j + 3 * h);
      Butterfly(v0, v1), Butterfly(v2, v3);
      Butterfly(v0, v2), Butterfly(v1, v3);
      hn::StoreU(v0, d, y + j), hn::StoreU(v1, d, y + j + h);
      hn::StoreU(v2, d, y + j + 2 * h), hn::StoreU(v3, d, y + j + 3 * h);
    }
  }
}

template <class D>
HWY_INLINE void HadamardRadix2(D d, float* HWY_RESTRICT y, uint32_t n, uint32_t h) {
  for (uint32_t base = 0; base < n; base += 2 * h) {
    for (uint32_t j = base; j < base + h; j += static_cast<uint32_t>(hn::Lanes(d))) {
      auto v0 = hn::LoadU(d, y + j), v1 = hn::LoadU(d, y + j + h);
      Butterfly(v0, v1);
      hn::StoreU(v0, d, y + j), hn::StoreU(v1, d, y + j + h);
    }
  }
}

// n: a power of two.
HWY_INLINE void Hadamard(float* HWY_RESTRICT y, uint32_t n) {
  const DHadamard d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  if (n < lanes) {
    for (uint32_t h = 1; h < n; h *= 2) {
      for (uint32_t j = 0; j < n; ++j) {
        if ((j & h) != 0) continue;
        const float a = y[j], b = y[j + h];
        y[j] = a + b;
        y[j + h] = a - b;
      }
    }
    return;
  }
  uint32_t h = lanes;
  if (8 * h <= n) {
    HadamardRadix8<true>(d, y, n, h);
    h *= 8;
  } else {
    for (uint32_t j = 0; j < n; j += lanes) hn::StoreU(HadamardInLane(d, hn::LoadU(d, y + j)), d, y + j);
  }
  for (; 8 * h <= n; h *= 8) HadamardRadix8<false>(d, y, n, h);
  if (4 * h <= n) {
    HadamardRadix4(d, y, n, h);
    h *= 4;
  }
  if (2 * h <= n) HadamardRadix2(d, y, n, h);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
