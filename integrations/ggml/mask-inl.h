// What a row of queries sees of a block of cells. The mask is the only word on it: cells are in any
// order, with gaps, and of several sequences.

#if defined(GYRE_GGML_MASK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_MASK_INL_H
#undef GYRE_GGML_MASK_INL_H
#else
#define GYRE_GGML_MASK_INL_H
#endif

#include "cpu/attention/softmax-inl.h"
#include "unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {
using cpu::HWY_NAMESPACE::kLog2E;
using cpu::HWY_NAMESPACE::kMinusInfinity;

enum class View : uint8_t { nothing, everything, some };  // some: some cells, or with a bias

constexpr uint16_t kHidden = 0xFC00;  // f16's -inf

// Fetches as many cells behind these: masks of many tokens lie pages apart.
HWY_INLINE View ViewOf(const uint16_t* mask, uint32_t cells) {
  for (uint32_t i = cells; i < 2 * cells; i += 32) hwy::Prefetch(mask + i);
  const hn::CappedTag<uint16_t, 32> d;
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  auto bits = hn::Zero(d);     // of all that are not a zero of either sign
  auto visible = hn::Zero(d);  // bits in which some cell differs from kHidden
  uint32_t i = 0;
  for (; i + lanes <= cells; i += lanes) {
    const auto x = hn::LoadU(d, mask + i);
    bits = hn::Or(bits, hn::And(x, hn::Set(d, uint16_t{0x7FFF})));
    visible = hn::Or(visible, hn::Xor(x, hn::Set(d, kHidden)));
  }
  uint16_t more_bits = 0, more_visible = 0;
  for (; i < cells; ++i) {
    more_bits = static_cast<uint16_t>(more_bits | (mask[i] & 0x7FFF));
    more_visible = static_cast<uint16_t>(more_visible | (mask[i] ^ kHidden));
  }
  if (more_visible == 0 && hn::AllTrue(d, hn::Eq(visible, hn::Zero(d)))) return View::nothing;
  const bool zero = more_bits == 0 && hn::AllTrue(d, hn::Eq(bits, hn::Zero(d)));
  return zero ? View::everything : View::some;
}

// Base-2 logits of a row: slope * mask is added, hidden cells become -inf whatever they were.
// `slope` includes the change of base. Lanes beyond `cells`, up to a multiple of 16, are hidden.
HWY_INLINE void AddMask(const uint16_t* mask, uint32_t cells, float slope, float* logits) {
  const DW d;
  const auto hidden = hn::Set(d, kMinusInfinity), slopes = hn::Set(d, slope);
  const auto add = [&](const uint16_t* from, uint32_t i) {
    const auto m = LoadF32(d, reinterpret_cast<const Half*>(from));
    const auto x = hn::MulAdd(slopes, m, hn::Load(d, logits + i));
    hn::Store(hn::IfThenElse(hn::Eq(m, hidden), hidden, x), d, logits + i);
  };
  const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
  uint32_t i = 0;
  for (; i + lanes <= cells; i += lanes) add(mask + i, i);
  if (i == cells) return;
  uint16_t rest[16];
  std::fill(std::copy(mask + i, mask + cells, rest), rest + 16, kHidden);
  for (uint32_t j = 0; i < padded(cells); i += lanes, j += lanes) add(rest + j, i);
}

// The slope of ALiBi for a head, as ggml defines it.
inline float SlopeOf(float max_bias, uint64_t heads, uint64_t head) {
  if (!(max_bias > 0)) return 1.0f;
  uint64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const auto base = static_cast<float>(power);
  return head < power ? std::pow(std::exp2(-max_bias / base), static_cast<float>(head + 1))
                      : std::pow(std::exp2(-max_bias / 2 / base),
                                 static_cast<float>(2 * (head - power) + 1));
}

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
