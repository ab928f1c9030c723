// Rows times matrices and sums of products, in the order of docs/kv_formats.md, "Calibrated rows".

#if defined(GYRE_CPU_ROW_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ROW_PRODUCTS_INL_H
#undef GYRE_CPU_ROW_PRODUCTS_INL_H
#else
#define GYRE_CPU_ROW_PRODUCTS_INL_H
#endif

#include <cmath>
#include <cstdint>

#include "cpu/kernels/hadamard-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

using DCalibrated = hn::CappedTag<float, 16>;  // along coordinates, of which there are at least 16

// One rounding on every target.
#if HWY_NATIVE_FMA
template <class D>
HWY_INLINE hn::Vec<D> FusedMulAdd(D /*d*/, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return hn::MulAdd(a, b, c);
}
#else
template <class D>
HWY_NOINLINE hn::Vec<D> FusedMulAdd(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  alignas(64) float x[hn::MaxLanes(d)], y[hn::MaxLanes(d)], z[hn::MaxLanes(d)];
  hn::Store(a, d, x), hn::Store(b, d, y), hn::Store(c, d, z);
  for (size_t i = 0; i < hn::MaxLanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
}
#endif

constexpr uint32_t kRowsAhead = 16;  // of a matrix: columns are too far apart for the prefetcher

// A matrix of some rows, `columns` floats apart. A row is what one coordinate adds.
struct MatrixRows {
  const float* at;
  uint32_t count;
  uint32_t columns;
};

// Columns [begin, end), whole panels of kColumns, of kRows rows, `stride` floats apart, times one
// matrix: out[i] is a chain over j.
template <uint32_t kRows, uint32_t kColumns>
HWY_INLINE void MultiplyPanels(const MatrixRows& matrix, const float* HWY_RESTRICT x, size_t stride,
                               uint32_t begin, uint32_t end, float* HWY_RESTRICT out) {
  const DCalibrated d;
  constexpr size_t kLanes = hn::MaxLanes(d), kAtOnce = kColumns / kLanes;
  for (uint32_t first = begin; first < end; first += kColumns) {
    hn::Vec<DCalibrated> sum[kRows][kAtOnce];
    for (auto& row : sum)
      for (auto& v : row) v = hn::Zero(d);
    const float* at = matrix.at + first;
    for (uint32_t j = 0; j < matrix.count; ++j, at += matrix.columns) {
      for (uint32_t line = 0; line < kColumns; line += 16)
        __builtin_prefetch(at + size_t{kRowsAhead} * matrix.columns + line);
      for (size_t k = 0; k < kAtOnce; ++k) {
        const auto m = hn::LoadU(d, at + k * kLanes);
        for (uint32_t r = 0; r < kRows; ++r)
          sum[r][k] = FusedMulAdd(d, m, hn::Set(d, x[r * stride + j]), sum[r][k]);
      }
    }
    for (uint32_t r = 0; r < kRows; ++r)
      for (size_t k = 0; k < kAtOnce; ++k)
        hn::Store(sum[r][k], d, out + r * stride + first + k * kLanes);
  }
}

template <uint32_t kRows>
HWY_NOINLINE void MultiplyRows(const float* HWY_RESTRICT matrix, const float* HWY_RESTRICT x,
                               size_t stride, uint32_t n, float* HWY_RESTRICT out) {
  constexpr uint32_t kWide = kRows == 1 ? 64 : 16;
  const uint32_t wide = n / kWide * kWide;
  MultiplyPanels<kRows, kWide>({matrix, n, n}, x, stride, 0, wide, out);
  MultiplyPanels<kRows, 16>({matrix, n, n}, x, stride, wide, n, out);
}

// The documented sum of products: 32 chains, then pairs 16, 8, 4, 2 and 1 apart.
HWY_NOINLINE inline float SumProducts(const float* HWY_RESTRICT v, const float* HWY_RESTRICT w,
                                      uint32_t n) {
  const DHadamard d;
  VHadamard chains[8];
  for (auto& chain : chains) chain = hn::Zero(d);
  const auto add = [&](uint32_t i, size_t k) HWY_ATTR {
    chains[k] = FusedMulAdd(d, hn::Load(d, v + i + 4 * k), hn::Load(d, w + i + 4 * k), chains[k]);
  };
  if (n == 16) {
    for (size_t k = 0; k < 4; ++k) add(0, k);
  } else {
    for (uint32_t i = 0; i < n; i += 32)
      for (size_t k = 0; k < 8; ++k) add(i, k);
  }
  for (size_t k = 0; k < 4; ++k) chains[k] = hn::Add(chains[k], chains[k + 4]);
  const auto four = hn::Add(hn::Add(chains[0], chains[2]), hn::Add(chains[1], chains[3]));
  alignas(16) float lanes[4];
  hn::Store(four, d, lanes);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
