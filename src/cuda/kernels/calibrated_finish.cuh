#pragma once
// From the targets of a scale block to its codes and scale, by a warp: steps 7 and 8 of
// docs/kv_formats.md, "Calibrated rows". Coordinate i is lane i % 32's, as the chains of sums have
// it.
#include "abi/kv_feedback.h"
#include "cuda/kernels/calibrated_levels.cuh"

namespace gyre::cuda {

// A scale block in shared memory and what is known about it.
struct CalibratedSource {
  const float* z;
  const float* w;  // z itself where there is no other
  const float* p;
  uint32_t n;
  uint32_t largest;  // bits of the row's largest magnitude
  float sum;         // of z z
};

struct CalibratedTarget {
  uint8_t* row;
  uint32_t n;      // coordinates of the row
  uint32_t begin;  // of the block
  float* errors;   // z, which becomes what the codes leave; null: nobody asks
};

struct GainSums {
  float pm, mm;

  __device__ float score() const { return __fdiv_rn(pm * pm, mm); }
};

// f: the factor times the gain that made the targets t. diagonal: null, or the weights.
template <uint32_t kFormat>
__device__ GainSums sum_gain(const CalibratedSource& row, const float* diagonal, const float* t,
                             float f) {
  float pm = 0, mm = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x & 31; i < row.n; i += 32) {
    const float error = t[i] - level_of<kFormat>(t[i]);
    const float weighted = diagonal != nullptr ? error * diagonal[i] : error;
    const float m = row.p[i] * f - weighted;
    pm = __fmaf_rn(row.p[i], m, pm);
    mm = __fmaf_rn(m, m, mm);
  }
  return {add_chains(pm), add_chains(mm)};
}

// t, pm: of the gain that is kept.
template <uint32_t kFormat>
__device__ void write_calibrated(const CalibratedSource& row, bool is_v, const float* t, float pm,
                                 const CalibratedTarget& to) {
  const uint32_t lane = threadIdx.x & 31, n = row.n;
  const bool is_zero = row.largest == 0 || row.sum == 0;
  const bool is_calibrated = !is_zero && row.largest < 0x7F800000u && is_finite(row.sum);
  float above = 0, below = 0, levels = 0;
#pragma unroll 4
  for (uint32_t i = lane; i < n; i += 32) {
    const float level = level_of<kFormat>(t[i]);
    const uint32_t code = is_calibrated ? code_of<kFormat>(t[i]) : abi::kv_zero_code(kFormat);
    to.row[abi::kv_calibrated_codes(to.n) + to.begin + i] = static_cast<uint8_t>(code);
    above = is_v ? __fmaf_rn(row.p[i], row.p[i], above) : __fmaf_rn(row.z[i], row.w[i], above);
    below = __fmaf_rn(level, row.w[i], below);
    levels = __fmaf_rn(level, level, levels);
  }
  above = add_chains(above), below = add_chains(below), levels = add_chains(levels);
  if (is_v) below = pm;
  const float ratio =
      above > 0 && below > 0 ? __fdiv_rn(above, below) : __fsqrt_rn(__fdiv_rn(row.sum, levels));
  const int exponent = is_calibrated ? lost_exponent(row.largest) : 0;
  uint32_t scale = calibrated_scale<kFormat>(ratio, to.n, power_of_two(exponent));
  if (!is_calibrated) scale = is_zero ? 0u : uint32_t{abi::kKvScaleNaN};
  uint8_t* const scales = to.row + abi::kv_calibrated_scale(to.n);
  if (lane < 2)
    scales[to.begin / abi::kKvScaleBlock * 2 + lane] = static_cast<uint8_t>(scale >> (8 * lane));
  if (to.errors == nullptr) return;
#pragma unroll 4
  for (uint32_t i = lane; i < n; i += 32)
    to.errors[i] = is_calibrated ? __fmaf_rn(level_of<kFormat>(t[i]), -ratio, row.z[i]) : 0.0f;
}

}  // namespace gyre::cuda
