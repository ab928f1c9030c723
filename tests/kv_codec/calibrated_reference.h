#pragma once
// Calibrated rows as plain scalar code, written from docs/kv_formats.md, "Calibrated rows". Shares
// no code with the library. Programs that include this must be built without contraction.

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "gyre/dtype.h"
#include "kv_codec/kv_codec_reference.h"

namespace gyre::reference {

// What the rows of one head are calibrated with; null: not given. Matrices are [n][n].
struct CalibratedRowInputs {
  const float* matrix = nullptr;
  const float* inverse = nullptr;
  const float* mean = nullptr;
  const float* factor = nullptr;
  const float* diagonal = nullptr;
  std::vector<float> gains = {1.0f};
};

struct CalibratedRowResult {
  std::vector<uint8_t> codes;
  uint16_t scale = 0;
  std::vector<uint16_t> near;  // bits of f16: the row in its basis
};

// The documented sum of products.
inline float calibrated_sum(std::span<const float> v, std::span<const float> w) {
  float chains[32] = {};
  for (size_t i = 0; i < v.size(); ++i) chains[i % 32] = std::fma(v[i], w[i], chains[i % 32]);
  for (size_t half = 16; half != 0; half /= 2) {
    for (size_t c = 0; c < half; ++c) chains[c] = chains[c] + chains[c + half];
  }
  return chains[0];
}

// out[i] is a chain over j, with row j of the matrix what x[j] adds.
inline std::vector<float> calibrated_product(const float* matrix, std::span<const float> x) {
  std::vector<float> out(x.size());
  for (size_t j = 0; j < x.size(); ++j) {
    for (size_t i = 0; i < x.size(); ++i) out[i] = std::fma(matrix[j * x.size() + i], x[j], out[i]);
  }
  return out;
}

inline std::vector<float> calibrated_rotation(std::vector<float> x) {
  for (uint32_t j = 0; j < x.size(); ++j) x[j] = kv_flips(j) ? -x[j] : x[j];
  walsh_hadamard<float>(x);
  return x;
}

// A level is so many times what t is measured in.
inline float calibrated_unit(const KvCoder& coder) {
  if (!coder.magnitudes.empty()) return 2.0f;
  return coder.bits == 8 ? 1.0f : 0.5f;
}

// One gain's levels, in t's unit, and what they leave.
struct CalibratedGain {
  std::vector<uint8_t> codes;
  std::vector<float> levels, m;
};

// f: factor times gain. p: step 5.
inline CalibratedGain calibrated_gain(const KvCoder& coder, const CalibratedRowInputs& in, float f,
                                      std::span<const float> z, std::span<const float> p) {
  const size_t n = z.size();
  std::vector<float> a(n);
  CalibratedGain made;
  for (size_t i = 0; i < n; ++i) {
    const float v = z[i] * f, t = v + a[i];
    const uint32_t code = kv_code_of(coder, t, 1.0f);
    const float level = static_cast<float>(kv_level_of(coder, code)) * calibrated_unit(coder);
    const float rest = t - level, error = v - level;
    made.codes.push_back(static_cast<uint8_t>(code));
    made.levels.push_back(level);
    made.m.push_back(p[i] * f - (in.diagonal != nullptr ? rest * in.diagonal[i] : rest));
    for (size_t j = i + 1; in.factor != nullptr && j < n; ++j)
      a[j] = std::fma(in.factor[i * n + j], error, a[j]);
  }
  return made;
}

inline std::vector<float> calibrated_target(const CalibratedRowInputs& in,
                                            std::span<const float> z) {
  const size_t n = z.size();
  std::vector<float> p(z.begin(), z.end());
  for (size_t i = 0; i < n; ++i) {
    float a = 0;
    for (size_t j = 0; in.factor != nullptr && j < i; ++j)
      a = std::fma(in.factor[j * n + i], z[j], a);
    if (in.diagonal != nullptr) p[i] = (z[i] + a) * in.diagonal[i];
  }
  return p;
}

// Steps 4 to 8. z: the row, rotated. w: step 3.
inline void calibrated_choice(const KvCoder& coder, const CalibratedRowInputs& in,
                              std::span<const float> z, std::span<const float> w, int exponent,
                              CalibratedRowResult& out) {
  const auto n = static_cast<float>(z.size());
  const float sum = calibrated_sum(z, z);
  if (sum == 0 || !std::isfinite(sum)) {
    out.scale = sum == 0 ? uint16_t{0} : uint16_t{0xFFC0};
    return;
  }
  float factor = 0;
  if (!coder.magnitudes.empty()) {
    factor = static_cast<float>(2 / coder.best_factor) / std::sqrt(sum / n);
  } else {
    float largest = 0;
    for (const float v : z) largest = std::max(largest, std::fabs(v));
    factor = coder.top() / largest;
  }
  const std::vector<float> p = calibrated_target(in, z);
  CalibratedGain best;
  float best_score = 0, best_b = 0;
  for (size_t g = 0; g < in.gains.size(); ++g) {
    CalibratedGain made = calibrated_gain(coder, in, factor * in.gains[g], z, p);
    const float b = calibrated_sum(p, made.m), score = (b * b) / calibrated_sum(made.m, made.m);
    if (g != 0 && !(score > best_score)) continue;
    best = std::move(made), best_score = score, best_b = b;
  }
  const float above = coder.values ? calibrated_sum(p, p) : calibrated_sum(z, w);
  const float below = coder.values ? best_b : calibrated_sum(best.levels, w);
  const float ratio = above > 0 && below > 0
                          ? above / below
                          : std::sqrt(sum / calibrated_sum(best.levels, best.levels));
  out.codes = best.codes;
  out.scale = kv_scale_pattern(ratio * calibrated_unit(coder) * (1.0f / std::sqrt(n)), exponent);
}

// A head of a token; `values`: of V.
inline CalibratedRowResult calibrated_row(std::string_view format, bool values,
                                          std::span<const float> x, const CalibratedRowInputs& in) {
  const KvCoder coder = kv_coder(format, values);
  std::vector<float> y(x.begin(), x.end());
  float largest = 0;
  bool finite = true;
  for (size_t i = 0; i < y.size(); ++i) {
    if (in.mean != nullptr) y[i] = y[i] - in.mean[i];
    finite = finite && std::isfinite(y[i]);
    largest = std::max(largest, std::fabs(y[i]));
  }
  const bool in_range = largest == 0 || (largest >= 0x1p-30f && largest <= 0x1p30f);
  const int exponent = in_range || !finite ? 0 : std::ilogb(largest);
  for (float& v : y) v = std::ldexp(v, -exponent);
  const std::vector<float> b = in.matrix != nullptr ? calibrated_product(in.matrix, y) : y;
  CalibratedRowResult out;
  for (const float v : b) out.near.push_back(Half(std::ldexp(v, exponent)).bits);
  out.codes.assign(y.size(), static_cast<uint8_t>(kv_zero_code(coder)));
  out.scale = finite ? uint16_t{0} : uint16_t{0xFFC0};
  if (!finite || largest == 0) return out;
  const std::vector<float> z = calibrated_rotation(b);
  const bool has_own = !values && in.inverse != nullptr;
  const std::vector<float> w = has_own ? calibrated_rotation(calibrated_product(in.inverse, y)) : z;
  calibrated_choice(coder, in, z, w, exponent, out);
  return out;
}

}  // namespace gyre::reference
