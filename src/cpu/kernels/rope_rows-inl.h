// Rotating (and normalising) rows: several heads of one token at a time, so that one load of the
// angles serves all of them and their norms overlap.

#if defined(GYRE_CPU_ROPE_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ROPE_ROWS_INL_H
#undef GYRE_CPU_ROPE_ROWS_INL_H
#else
#define GYRE_CPU_ROPE_ROWS_INL_H
#endif

#include <cmath>

#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/rope_code-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Where a run of pairs is: in the angles, and its two halves in the row.
struct RopePlace {
  uint64_t angle, u, v;
};

// Heads of one token, typed.
template <class In, class Out>
struct RopeRows {
  const RopeHeads at;

  const In* x_row(uint32_t r) const { return pointer<const In>(at.x + r * at.x_step); }
  Out* out_row(uint32_t r) const { return pointer<Out>(at.out + r * at.out_step); }
};

// Coordinates u_at.. and v_at.. of every row; `i` counts within the angles.
template <bool kNorm, uint32_t kRows, class D, class In, class Out>
HWY_INLINE void TurnSplit(D d, const RopeFactors& f, const RopeRows<In, Out>& rows,
                          const float* scale, const RopePlace& at) {
  const auto cosine_u = hn::LoadU(d, f.cosine_u + at.angle);
  const auto sine_u = hn::LoadU(d, f.sine_u + at.angle);
  const auto cosine_v = kNorm ? hn::LoadU(d, f.cosine_v + at.angle) : cosine_u;
  const auto sine_v = kNorm ? hn::LoadU(d, f.sine_v + at.angle) : sine_u;
  for (uint32_t r = 0; r < kRows; ++r) {
    auto u = LoadF32(d, rows.x_row(r) + at.u);
    auto v = LoadF32(d, rows.x_row(r) + at.v);
    if constexpr (kNorm) {
      u = hn::Mul(u, hn::Set(d, scale[r]));
      v = hn::Mul(v, hn::Set(d, scale[r]));
    }
    StoreF32(d, hn::NegMulAdd(v, sine_v, hn::Mul(u, cosine_u)), rows.out_row(r) + at.u);
    StoreF32(d, hn::MulAdd(u, sine_u, hn::Mul(v, cosine_v)), rows.out_row(r) + at.v);
  }
}

template <bool kNorm, uint32_t kRows, class D, class In, class Out>
HWY_INLINE void TurnAdjacent(D d, const RopeFactors& f, const RopeRows<In, Out>& rows,
                             const float* scale, uint64_t at) {
  const auto cosine = hn::LoadU(d, f.cosine_u + at);
  const auto sine = hn::LoadU(d, f.sine_u + at);
  for (uint32_t r = 0; r < kRows; ++r) {
    auto x = LoadF32(d, rows.x_row(r) + at);
    if constexpr (kNorm) x = hn::Mul(x, hn::Set(d, scale[r]));
    StoreF32(d, hn::MulAdd(hn::Reverse2(d, x), sine, hn::Mul(x, cosine)), rows.out_row(r) + at);
  }
}

template <bool kAdjacent, bool kNorm, uint32_t kRows, class In, class Out>
HWY_INLINE void TurnRows(const RopeShape& p, const RopeFactors& f, const RopeRows<In, Out>& rows,
                         const float* scale) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, kAdjacent ? 2 : 1> tail;
  const uint64_t lanes = hn::Lanes(d);
  if constexpr (kAdjacent) {
    const uint64_t count = 2 * p.block_pairs;
    uint64_t i = 0;
    for (; i + lanes <= count; i += lanes) TurnAdjacent<kNorm, kRows>(d, f, rows, scale, i);
    for (; i < count; i += 2) TurnAdjacent<kNorm, kRows>(tail, f, rows, scale, i);
  } else {
    for (uint64_t block = 0; block < p.blocks; ++block) {
      const uint64_t first = block * p.block_pairs;
      const uint64_t u = block * p.block_stride, v = u + p.distance;
      uint64_t i = 0;
      for (; i + lanes <= p.block_pairs; i += lanes) {
        TurnSplit<kNorm, kRows>(d, f, rows, scale, {first + i, u + i, v + i});
      }
      for (; i < p.block_pairs; ++i) {
        TurnSplit<kNorm, kRows>(tail, f, rows, scale, {first + i, u + i, v + i});
      }
    }
  }
}

// Coordinates [begin, end), which are not rotated.
template <bool kNorm, uint32_t kRows, class In, class Out>
HWY_INLINE void PassRows(const RopeFactors& f, const RopeRows<In, Out>& rows, const float* scale,
                         uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  for (uint32_t r = 0; r < kRows; ++r) {
    if constexpr (kNorm) {
      const hn::ScalableTag<float> d;
      const hn::CappedTag<float, 1> one;
      const auto pass = [&](auto tag, uint64_t i) HWY_ATTR {
        const auto x = hn::Mul(LoadF32(tag, rows.x_row(r) + i), hn::Set(tag, scale[r]));
        StoreF32(tag, hn::Mul(x, hn::LoadU(tag, f.weight + i)), rows.out_row(r) + i);
      };
      uint64_t i = begin;
      for (; i + hn::Lanes(d) <= end; i += hn::Lanes(d)) pass(d, i);
      for (; i < end; ++i) pass(one, i);
    } else if (rows.at.x != rows.at.out) {
      CopyRow(rows.x_row(r) + begin, rows.out_row(r) + begin, end - begin);
    }
  }
}

template <class In>
HWY_INLINE float SumOfSquares(const In* HWY_RESTRICT x, uint64_t count) {
  const hn::ScalableTag<float> d;
  const uint64_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  uint64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto v0 = LoadF32(d, x + i), v1 = LoadF32(d, x + i + lanes);
    const auto v2 = LoadF32(d, x + i + 2 * lanes), v3 = LoadF32(d, x + i + 3 * lanes);
    sum0 = hn::MulAdd(v0, v0, sum0);
    sum1 = hn::MulAdd(v1, v1, sum1);
    sum2 = hn::MulAdd(v2, v2, sum2);
    sum3 = hn::MulAdd(v3, v3, sum3);
  }
  for (; i + lanes <= count; i += lanes) {
    const auto v = LoadF32(d, x + i);
    sum0 = hn::MulAdd(v, v, sum0);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < count; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  return sum;
}

template <class In>
HWY_NOINLINE float WideScaleOfRow(const In* x, uint64_t count, float epsilon) {
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const double v = static_cast<float>(x[i]);
    sum += v * v;
  }
  return static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(count) + epsilon));
}

// 1 / sqrt(mean(x^2) + epsilon). Squares leave f32 long before their root does: a sum that
// overflowed, or that is so small that squares were lost, is taken again in double precision.
template <class In>
HWY_INLINE float ScaleOfRow(const In* x, uint64_t count, float epsilon) {
  const float sum = SumOfSquares(x, count);
  if (HWY_UNLIKELY(!(sum >= 0x1p-100f && sum <= 0x1p127f))) {
    return WideScaleOfRow(x, count, epsilon);
  }
  return 1.0f / std::sqrt(sum / static_cast<float>(count) + epsilon);
}

template <bool kAdjacent, bool kNorm, uint32_t kRows, class In, class Out>
void DoRows(const RopeShape& shape, const RopeFactors& factors, const RopeHeads& heads) {
  const RopeShape p = shape;  // copies, which no store can alias
  const RopeFactors f = factors;
  const RopeRows<In, Out> rows{heads};
  float scale[kRows] = {};
  if constexpr (kNorm) {
    for (uint32_t r = 0; r < kRows; ++r) {
      scale[r] = ScaleOfRow(rows.x_row(r), p.head_dim, p.epsilon);
    }
  }
  TurnRows<kAdjacent, kNorm, kRows>(p, f, rows, scale);
  if constexpr (kAdjacent) {
    PassRows<kNorm, kRows>(f, rows, scale, 2 * p.block_pairs, p.head_dim);
  } else if (p.blocks == 1) {
    PassRows<kNorm, kRows>(f, rows, scale, p.block_pairs, p.distance);
    PassRows<kNorm, kRows>(f, rows, scale, p.distance + p.block_pairs, p.head_dim);
  }
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
