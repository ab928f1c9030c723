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
  KvCodes coded;
  std::vector<uint16_t> near;  // bits of f16: the row in its basis
};

// A scale block of a row: coordinates [begin, end).
struct CalibratedBlock {
  size_t begin, end;
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

// What coordinates [0, end) of z add to coordinate i.
inline float calibrated_sum_before(const CalibratedRowInputs& in, std::span<const float> z,
                                   size_t end, size_t i) {
  float a = 0;
  for (size_t j = 0; in.factor != nullptr && j < end; ++j)
    a = std::fma(in.factor[j * z.size() + i], z[j], a);
  return a;
}

// f: factor times gain. p: step 5.
inline CalibratedGain calibrated_gain(const KvCoder& coder, const CalibratedRowInputs& in,
                                      CalibratedBlock block, float f, std::span<const float> z,
                                      std::span<const float> p) {
  const size_t n = z.size();
  std::vector<float> a(n);
  for (size_t i = block.begin; i < block.end; ++i)
    a[i] = calibrated_sum_before(in, z, block.begin, i) * f;
  CalibratedGain made;
  for (size_t i = block.begin; i < block.end; ++i) {
    const float v = z[i] * f, t = v + a[i];
    const uint32_t code = kv_code_of(coder, t, 1.0f);
    const float level = static_cast<float>(kv_level_of(coder, code)) * calibrated_unit(coder);
    const float rest = t - level, error = v - level;
    made.codes.push_back(static_cast<uint8_t>(code));
    made.levels.push_back(level);
    made.m.push_back(p[i - block.begin] * f -
                     (in.diagonal != nullptr ? rest * in.diagonal[i] : rest));
    for (size_t j = i + 1; in.factor != nullptr && j < block.end; ++j)
      a[j] = std::fma(in.factor[i * n + j], error, a[j]);
  }
  return made;
}

inline std::vector<float> calibrated_target(const CalibratedRowInputs& in, CalibratedBlock block,
                                            std::span<const float> z) {
  std::vector<float> p;
  for (size_t i = block.begin; i < block.end; ++i)
    p.push_back(in.diagonal != nullptr
                    ? (z[i] + calibrated_sum_before(in, z, i, i)) * in.diagonal[i]
                    : z[i]);
  return p;
}

// Steps 4 to 8 of a scale block. row: rotated; the block becomes what its codes leave. row_w: step
// 3.
inline void calibrated_choice(const KvCoder& coder, const CalibratedRowInputs& in,
                              CalibratedBlock block, std::span<float> row,
                              std::span<const float> row_w, int exponent, KvCodes& out) {
  const size_t size = block.end - block.begin;
  const std::span<float> z = row.subspan(block.begin, size);
  const std::vector<float> w(row_w.begin() + static_cast<ptrdiff_t>(block.begin),
                             row_w.begin() + static_cast<ptrdiff_t>(block.end));
  const float sum = calibrated_sum(z, z);
  if (sum == 0 || !std::isfinite(sum)) {
    out.codes.insert(out.codes.end(), size, static_cast<uint8_t>(kv_zero_code(coder)));
    out.scales.push_back(sum == 0 ? uint16_t{0} : uint16_t{0xFFC0});
    std::ranges::fill(z, 0.0f);
    return;
  }
  float factor = 0;
  if (!coder.magnitudes.empty()) {
    factor = static_cast<float>(2 / coder.best_factor) / std::sqrt(sum / static_cast<float>(size));
  } else {
    float largest = 0;
    for (const float v : z) largest = std::max(largest, std::fabs(v));
    factor = coder.top() / largest;
  }
  const std::vector<float> p = calibrated_target(in, block, row);
  CalibratedGain best;
  float best_score = 0, best_b = 0;
  for (size_t g = 0; g < in.gains.size(); ++g) {
    CalibratedGain made = calibrated_gain(coder, in, block, factor * in.gains[g], row, p);
    const float b = calibrated_sum(p, made.m), score = (b * b) / calibrated_sum(made.m, made.m);
    if (g != 0 && !(score > best_score)) continue;
    best = std::move(made), best_score = score, best_b = b;
  }
  const float above = coder.values ? calibrated_sum(p, p) : calibrated_sum(z, w);
  const float below = coder.values ? best_b : calibrated_sum(best.levels, w);
  const float ratio = above > 0 && below > 0
                          ? above / below
                          : std::sqrt(sum / calibrated_sum(best.levels, best.levels));
  out.codes.insert(out.codes.end(), best.codes.begin(), best.codes.end());
  const float inverse_root = 1.0f / std::sqrt(static_cast<float>(row.size()));
  out.scales.push_back(kv_scale_pattern(ratio * calibrated_unit(coder) * inverse_root, exponent));
  for (size_t i = 0; i < size; ++i) z[i] = std::fma(-ratio, best.levels[i], z[i]);
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
  const size_t size = std::min<size_t>(y.size(), 256);
  if (!finite || largest == 0) {
    out.coded.codes.assign(y.size(), static_cast<uint8_t>(kv_zero_code(coder)));
    out.coded.scales.assign(y.size() / size, finite ? uint16_t{0} : uint16_t{0xFFC0});
    return out;
  }
  std::vector<float> z = calibrated_rotation(b);
  const bool has_own = !values && in.inverse != nullptr;
  const std::vector<float> w = has_own ? calibrated_rotation(calibrated_product(in.inverse, y)) : z;
  for (size_t begin = 0; begin < z.size(); begin += size)
    calibrated_choice(coder, in, {begin, begin + size}, z, w, exponent, out.coded);
  return out;
}

}  // namespace gyre::reference
