// A row becomes a calibrated row: docs/kv_formats.md, "Calibrated rows". Scale blocks are coded one
// after the other. Up to four chains run side by side, a lane each: the one that makes p, and those
// of gains.

#if defined(GYRE_CPU_KV_CALIBRATED_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_KV_CALIBRATED_INL_H
#undef GYRE_CPU_KV_CALIBRATED_INL_H
#else
#define GYRE_CPU_KV_CALIBRATED_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "abi/kv_feedback.h"
#include "cpu/kernels/copy-inl.h"
#include "cpu/kernels/hadamard-inl.h"
#include "cpu/kernels/kv_codes-inl.h"
#include "cpu/kernels/kv_signs.h"
#include "cpu/kernels/native_format.h"
#include "cpu/kernels/row_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kChains = 4;
constexpr uint32_t kGroup = 16;  // coordinates whose feedback is finished together

// What one head's rows are calibrated with; null: not given.
struct HeadCalibration {
  const float* matrix;
  const float* inverse;
  const float* mean;
  const float* factor;
  const float* diagonal;
  const float* gains;
  uint32_t gain_count, format;
  bool is_v;
};

// A row on its way, and the scale block that is being coded. Levels and what is left of a
// coordinate, (t - L), are stored by chain.
struct CalibratedWork {
  alignas(64) float y[abi::kKvMaxCalibratedDim];
  alignas(64) float b[abi::kKvMaxCalibratedDim];
  alignas(64) float z[abi::kKvMaxCalibratedDim];  // of blocks that are coded: their errors
  alignas(64) float w[abi::kKvMaxCalibratedDim];
  alignas(64) float m[abi::kKvMaxCalibratedDim];
  alignas(64) float carried[abi::kKvMaxCalibratedDim];  // what errors of the blocks before add
  alignas(64) float p[abi::kKvScaleBlock];
  alignas(64) float best[abi::kKvScaleBlock];  // levels of the gain that is kept
  alignas(64) float errors[abi::kKvScaleBlock][kChains];
  alignas(64) float levels[kChains][abi::kKvScaleBlock];
  alignas(64) float residuals[kChains][abi::kKvScaleBlock];
};

// A scale block of a row.
struct ScaleBlock {
  uint32_t n;             // coordinates
  uint32_t row_n;         // of the row: from row to row of the factor
  const float* factor;    // where the block's rows and columns meet; null: not given
  const float* diagonal;  // null: not given
  const float* carried;   // null: nothing
  const float* w;
  float* z;
};

HWY_INLINE void RotateRow(const float* HWY_RESTRICT b, uint32_t n, float* HWY_RESTRICT z) {
  const DHadamard d;
  const hn::RebindToUnsigned<DHadamard> du;
  const uint32_t* const signs = native_signs().data();
  for (uint32_t i = 0; i < n; i += 4)
    hn::Store(hn::Xor(hn::Load(d, b + i), hn::BitCast(d, hn::Load(du, signs + i))), d, z + i);
  Hadamard(z, n);
}

// The level nearest to t, in t's unit: twice the magnitude, half the odd integer, the byte.
template <uint32_t kFormat>
HWY_INLINE VHadamard NearestLevel(VHadamard t) {
  const DHadamard d;
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    const auto magnitude = hn::Abs(t);
    constexpr const uint8_t* kThresholds = kBits == 2   ? abi::kTq2Thresholds
                                           : kBits == 3 ? abi::kTq3Thresholds
                                                        : abi::kTq4Thresholds;
    const auto step = [&](uint32_t i) HWY_ATTR {
      const auto rise = static_cast<float>(
          2 * (abi::kv_magnitude(kFormat, i + 1) - abi::kv_magnitude(kFormat, i)));
      return hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(d, static_cast<float>(kThresholds[i]))),
                                hn::Set(d, rise));
    };
    // Integers: exact in any order. Pairs, because the chain waits for the sum.
    auto level =
        hn::Add(hn::Set(d, 2.0f * static_cast<float>(abi::kv_magnitude(kFormat, 0))), step(0));
    if constexpr (kBits >= 3) level = hn::Add(level, hn::Add(step(1), step(2)));
    if constexpr (kBits == 4)
      level = hn::Add(level, hn::Add(hn::Add(step(3), step(4)), hn::Add(step(5), step(6))));
    return hn::CopySign(level, t);
  } else if constexpr (kBits == 8) {
    const auto whole = hn::Ceil(hn::Sub(t, hn::Set(d, 0.5f)));
    return hn::Min(hn::Max(whole, hn::Set(d, -127.0f)), hn::Set(d, 127.0f));
  } else {
    constexpr float kUpper = 1u << (kBits - 1);
    const auto whole = hn::Min(hn::Max(hn::Ceil(t), hn::Set(d, 1.0f - kUpper)), hn::Set(d, kUpper));
    return hn::Sub(whole, hn::Set(d, 0.5f));
  }
}

// The code of a level of NearestLevel().
template <uint32_t kFormat>
HWY_INLINE VInt CodeOfLevel(VHadamard level) {
  const DHadamard d;
  const hn::RebindToSigned<DHadamard> di;
  constexpr uint32_t kBits = abi::kv_bits(kFormat);
  if constexpr (abi::kv_has_magnitudes(kFormat)) {
    const auto magnitude = hn::Abs(level);
    auto code = hn::ShiftRight<31 - (kBits - 1)>(
        hn::And(hn::BitCast(hn::RebindToUnsigned<DHadamard>(), level),
                hn::Set(hn::RebindToUnsigned<DHadamard>(), 0x80000000u)));
    auto index = hn::BitCast(di, code);
    for (uint32_t i = 1; i < 1u << (kBits - 1); ++i) {
      const auto from = hn::Set(d, 2.0f * static_cast<float>(abi::kv_magnitude(kFormat, i)));
      index = hn::Sub(index, hn::VecFromMask(di, hn::RebindMask(di, hn::Ge(magnitude, from))));
    }
    return index;
  } else if constexpr (kBits == 8) {
    return hn::ConvertTo(di, level);
  } else {
    constexpr int32_t kUpper = 1 << (kBits - 1);
    return hn::Add(hn::ConvertTo(di, hn::Add(level, hn::Set(d, 0.5f))), hn::Set(di, kUpper - 1));
  }
}

template <uint32_t kFormat>
HWY_NOINLINE void StoreCodes(const float* HWY_RESTRICT levels, uint32_t n,
                             uint8_t* HWY_RESTRICT codes) {
  const DHadamard d;
  const auto code = [&](uint32_t i)
                        HWY_ATTR { return CodeOfLevel<kFormat>(hn::Load(d, levels + i)); };
  for (uint32_t i = 0; i < n; i += 16)
    hn::StoreU(hn::BitCast(DCode(), NarrowToBytes(code(i), code(i + 4), code(i + 8), code(i + 12))),
               DCode(), codes + i);
}

constexpr float LevelUnit(uint32_t format) {
  return abi::kv_has_magnitudes(format) ? 2.0f : abi::kv_bits(format) == 8 ? 1.0f : 0.5f;
}

// What the errors of coordinates before `first` add to the kGroup from there on, by chain.
HWY_NOINLINE inline void FeedGroup(const ScaleBlock& block, const CalibratedWork& work,
                                   const float (&gains)[kChains], uint32_t first,
                                   float (&fed)[kChains][kGroup]) {
  const DCalibrated d;
  constexpr size_t kLanes = hn::MaxLanes(d), kAtOnce = kGroup / kLanes;
  hn::Vec<DCalibrated> sum[kChains][kAtOnce];
  for (auto& chain : sum)
    for (auto& v : chain) v = hn::Zero(d);
  if (block.carried != nullptr) {
    for (size_t k = 0; k < kAtOnce; ++k) {
      const auto carried = hn::Load(d, block.carried + first + k * kLanes);
      for (uint32_t c = 0; c < kChains; ++c) sum[c][k] = hn::Mul(carried, hn::Set(d, gains[c]));
    }
  }
  const float* at = block.factor + first;
  for (uint32_t j = 0; j < first; ++j, at += block.row_n) {
    __builtin_prefetch(at + kGroup);  // the next group's
    for (size_t k = 0; k < kAtOnce; ++k) {
      const auto row = hn::LoadU(d, at + k * kLanes);
      for (uint32_t c = 0; c < kChains; ++c)
        sum[c][k] = FusedMulAdd(d, row, hn::Set(d, work.errors[j][c]), sum[c][k]);
    }
  }
  for (uint32_t c = 0; c < kChains; ++c)
    for (size_t k = 0; k < kAtOnce; ++k) hn::Store(sum[c][k], d, fed[c] + k * kLanes);
}

// The coordinates of a group one after the other. first_lane: 1 if lane 0 makes p and rounds
// nothing.
template <uint32_t kFormat>
HWY_INLINE void CodeGroup(const ScaleBlock& block, uint32_t first, VHadamard gains,
                          uint32_t first_lane, float (&fed)[kChains][kGroup],
                          CalibratedWork& work) {
  const DHadamard d;
  const auto rounds = hn::Ge(hn::Iota(d, 0.0f), hn::Set(d, static_cast<float>(first_lane)));
  const float* const HWY_RESTRICT factor = block.factor;
  const size_t n = block.row_n;
  VHadamard add[kGroup], level[kGroup], residual[kGroup];
  for (uint32_t i = 0; i < kGroup; i += 4) {
    for (uint32_t c = 0; c < 4; ++c) add[i + c] = hn::Load(d, fed[c] + i);
    Transpose4(add[i], add[i + 1], add[i + 2], add[i + 3]);
  }
  for (uint32_t i = 0; i < kGroup; ++i) {
    const auto v = hn::Mul(hn::Set(d, block.z[first + i]), gains);
    const auto t = hn::Add(v, add[i]);
    level[i] = hn::IfThenElseZero(rounds, NearestLevel<kFormat>(t));
    const auto error = hn::Sub(v, level[i]);
    residual[i] = hn::Sub(t, level[i]);
    hn::Store(error, d, work.errors[first + i]);
    if (factor == nullptr) continue;
    const float* const row = factor + size_t{first + i} * n + first;
    __builtin_prefetch(row + kGroup);
    __builtin_prefetch(row + size_t{kGroup} * (n + 1));
    for (uint32_t j = i + 1; j < kGroup; ++j)
      add[j] = FusedMulAdd(d, hn::Set(d, row[j]), error, add[j]);
  }
  for (uint32_t i = 0; i < kGroup; i += 4) {
    Transpose4(level[i], level[i + 1], level[i + 2], level[i + 3]);
    Transpose4(residual[i], residual[i + 1], residual[i + 2], residual[i + 3]);
    for (uint32_t c = 0; c < 4; ++c) {
      hn::Store(level[i + c], d, work.levels[c] + first + i);
      hn::Store(residual[i + c], d, work.residuals[c] + first + i);
    }
  }
}

template <uint32_t kFormat>
HWY_NOINLINE void RunChains(const ScaleBlock& block, const float (&gains)[kChains],
                            uint32_t first_lane, CalibratedWork& work) {
  alignas(64) float fed[kChains][kGroup] = {};
  const auto gain = hn::LoadU(DHadamard(), gains);
  for (uint32_t first = 0; first < block.n; first += kGroup) {
    if (block.factor != nullptr) FeedGroup(block, work, gains, first, fed);
    CodeGroup<kFormat>(block, first, gain, first_lane, fed, work);
  }
}

// Keeps the levels of a chain whose error, once scaled, is the smallest so far.
struct BestGain {
  bool found = false;
  float score = 0;
  float sum_pm = 0;

  void Try(const ScaleBlock& block, uint32_t chain, float gain, CalibratedWork& work) {
    const uint32_t n = block.n;
    const float* const residual = work.residuals[chain];
    if (block.diagonal != nullptr) {
      for (uint32_t i = 0; i < n; ++i)
        work.m[i] = work.p[i] * gain - residual[i] * block.diagonal[i];
    } else {
      for (uint32_t i = 0; i < n; ++i) work.m[i] = work.p[i] * gain - residual[i];
    }
    const float pm = SumProducts(work.p, work.m, n), mm = SumProducts(work.m, work.m, n);
    const float fit = (pm * pm) / mm;
    if (found && !(fit > score)) return;
    found = true;
    score = fit;
    sum_pm = pm;
    std::memcpy(work.best, work.levels[chain], n * sizeof(float));
  }
};

// Levels of the best gain to work.best; the first four chains make p, too.
inline BestGain ChooseLevels(const HeadCalibration& calibration, const ScaleBlock& block,
                             float factor, CalibratedWork& work) {
  BestGain best;
  for (uint32_t done = 0; done < calibration.gain_count;) {
    const uint32_t first_lane = done == 0 ? 1 : 0;
    const uint32_t count = std::min(kChains - first_lane, calibration.gain_count - done);
    float gains[kChains] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (uint32_t c = 0; c < count; ++c)
      gains[first_lane + c] = factor * calibration.gains[done + c];
    with_native_format(calibration.format, [&](auto native) HWY_ATTR {
      RunChains<decltype(native)::value>(block, gains, first_lane, work);
    });
    for (uint32_t i = 0; i < block.n && first_lane == 1; ++i)
      work.p[i] = block.diagonal != nullptr ? work.residuals[0][i] * block.diagonal[i] : block.z[i];
    for (uint32_t c = 0; c < count; ++c)
      best.Try(block, first_lane + c, gains[first_lane + c], work);
    done += count;
  }
  return best;
}

// The largest magnitude; infinity and NaN are larger than any.
HWY_INLINE float LargestOf(const float* HWY_RESTRICT x, uint32_t n) {
  const hn::RebindToSigned<DHadamard> di;
  auto largest = hn::Zero(di);
  for (uint32_t i = 0; i < n; i += 4) {
    const auto bits = hn::BitCast(di, hn::Load(DHadamard(), x + i));
    largest = hn::Max(largest, hn::And(bits, hn::Set(di, 0x7FFFFFFF)));
  }
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

// z - scale x, rounded once.
HWY_INLINE void SubtractScaled(const float* HWY_RESTRICT x, float scale, uint32_t n,
                               float* HWY_RESTRICT z) {
  const DHadamard d;
  const auto minus = hn::Set(d, -scale);
  for (uint32_t i = 0; i < n; i += 4)
    hn::Store(FusedMulAdd(d, hn::Load(d, x + i), minus, hn::Load(d, z + i)), d, z + i);
}

inline uint16_t ScaleBits(float scale, float power) {
  const float scaled = scale * 0x1p31f * power;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  bits = std::min(bits, 0x7F800000u);
  return static_cast<uint16_t>((bits + 0x3FFFu + (bits >> 15 & 1)) >> 15);
}

inline void StoreScale(uint32_t n, uint32_t block, uint16_t scale, uint8_t* row) {
  std::memcpy(row + abi::kv_calibrated_scale(n) + block * sizeof scale, &scale, sizeof scale);
}

// Steps 4 to 8 of a scale block, whose z becomes what the codes leave.
inline uint16_t CodeScaleBlock(const HeadCalibration& calibration, const ScaleBlock& block,
                               float power, CalibratedWork& work, uint8_t* codes) {
  const uint32_t n = block.n;
  const float sum = SumProducts(block.z, block.z, n);
  if (sum == 0 || !std::isfinite(sum)) {
    std::memset(codes, static_cast<int>(abi::kv_zero_code(calibration.format)), n);
    std::memset(block.z, 0, n * sizeof(float));
    return sum == 0 ? uint16_t{0} : abi::kKvScaleNaN;
  }
  const float root = abi::kv_has_magnitudes(calibration.format)
                         ? std::sqrt(sum * (1.0f / static_cast<float>(n)))
                         : LargestOf(block.z, n);
  const BestGain best =
      ChooseLevels(calibration, block, abi::kv_codec(calibration.format).gain / root, work);
  const float above =
      calibration.is_v ? SumProducts(work.p, work.p, n) : SumProducts(block.z, block.w, n);
  const float below = calibration.is_v ? best.sum_pm : SumProducts(work.best, block.w, n);
  const float ratio = above > 0 && below > 0
                          ? above / below
                          : std::sqrt(sum / SumProducts(work.best, work.best, n));
  with_native_format(calibration.format, [&](auto native) HWY_ATTR {
    StoreCodes<decltype(native)::value>(work.best, n, codes);
  });
  SubtractScaled(work.best, ratio, n, block.z);
  const float inverse_root = 1.0f / std::sqrt(static_cast<float>(block.row_n));
  return ScaleBits(ratio * LevelUnit(calibration.format) * inverse_root, power);
}

// Codes and scales of work.b. w: see step 3.
inline void CodeRow(const HeadCalibration& calibration, uint32_t n, float power,
                    CalibratedWork& work, uint8_t* row) {
  RotateRow(work.b, n, work.z);
  const bool has_w = !calibration.is_v && calibration.inverse != nullptr;
  if (has_w) {
    MultiplyRows<1>(calibration.inverse, work.y, 0, n, work.m);
    RotateRow(work.m, n, work.w);
  }
  const float* const factor = calibration.factor;
  const uint32_t size = abi::kv_calibrated_block(n);
  for (uint32_t begin = 0; begin < n; begin += size) {
    ScaleBlock block{size,          n, nullptr, nullptr, nullptr, (has_w ? work.w : work.z) + begin,
                     work.z + begin};
    if (factor != nullptr) {
      block.factor = factor + size_t{begin} * (n + 1);
      block.diagonal = calibration.diagonal + begin;
      if (begin != 0) {
        MultiplyPanels<1, 64>({factor, begin, n}, work.z, 0, begin, begin + size, work.carried);
        block.carried = work.carried + begin;
      }
    }
    StoreScale(
        n, begin / size,
        CodeScaleBlock(calibration, block, power, work, row + abi::kv_calibrated_codes(n) + begin),
        row);
  }
}

// work.y: the row in f32. Writes a whole calibrated row.
HWY_NOINLINE inline void EncodeCalibratedRow(const HeadCalibration& calibration, uint32_t n,
                                             CalibratedWork& work, uint8_t* row) {
  if (calibration.mean != nullptr)
    for (uint32_t i = 0; i < n; ++i) work.y[i] -= calibration.mean[i];
  const float largest = LargestOf(work.y, n);
  const bool finite = std::isfinite(largest);
  const bool in_range = largest >= 0x1p-30f && largest <= 0x1p30f;
  const int exponent = in_range || largest == 0 || !finite ? 0 : std::ilogb(largest);
  if (exponent != 0)
    for (uint32_t i = 0; i < n; ++i) work.y[i] = std::ldexp(work.y[i], -exponent);
  if (calibration.matrix != nullptr) {
    MultiplyRows<1>(calibration.matrix, work.y, 0, n, work.b);
  } else {
    std::memcpy(work.b, work.y, n * sizeof(float));
  }
  auto* const f16 = reinterpret_cast<Half*>(row);
  if (exponent == 0) {
    CopyRow(static_cast<const float*>(work.b), f16, n);
  } else {
    for (uint32_t i = 0; i < n; ++i) f16[i] = Half(std::ldexp(work.b[i], exponent));
  }
  if (finite && largest != 0) return CodeRow(calibration, n, std::ldexp(1.0f, exponent), work, row);
  std::memset(row + abi::kv_calibrated_codes(n),
              static_cast<int>(abi::kv_zero_code(calibration.format)), n);
  for (uint32_t i = 0; i < n / abi::kv_calibrated_block(n); ++i)
    StoreScale(n, i, finite ? uint16_t{0} : abi::kKvScaleNaN, row);
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
