// The f32 multiply-add rate: independent chains in registers, no memory.
#include "fma_rate.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fma_rate.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

uint64_t RunFma(float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  constexpr uint32_t kSteps = 200000;
  const V a = hn::Set(d, 0.999f), b = hn::Set(d, 0.001f);
  V v0 = a, v1 = a, v2 = a, v3 = a, v4 = a, v5 = a, v6 = a, v7 = a, v8 = a, v9 = a, v10 = a,
    v11 = a;
  for (uint32_t i = 0; i < kSteps; ++i) {
    v0 = hn::MulAdd(a, b, v0), v1 = hn::MulAdd(a, b, v1), v2 = hn::MulAdd(a, b, v2);
    v3 = hn::MulAdd(a, b, v3), v4 = hn::MulAdd(a, b, v4), v5 = hn::MulAdd(a, b, v5);
    v6 = hn::MulAdd(a, b, v6), v7 = hn::MulAdd(a, b, v7), v8 = hn::MulAdd(a, b, v8);
    v9 = hn::MulAdd(a, b, v9), v10 = hn::MulAdd(a, b, v10), v11 = hn::MulAdd(a, b, v11);
  }
  const V all = hn::Add(hn::Add(hn::Add(v0, v1), hn::Add(v2, v3)),
                        hn::Add(hn::Add(hn::Add(v4, v5), hn::Add(v6, v7)),
                                hn::Add(hn::Add(v8, v9), hn::Add(v10, v11))));
  *sink = hn::GetLane(hn::SumOfLanes(d, all));
  return uint64_t{2} * 12 * kSteps * hn::Lanes(d);
}

}  // namespace gyre::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::bench {

HWY_EXPORT(RunFma);

uint64_t run_fma(float* sink) { return HWY_DYNAMIC_DISPATCH(RunFma)(sink); }

}  // namespace gyre::bench
#endif
