#pragma once

#include "gyre_test.h"
#include "numbers.h"
#include "run_now.h"

namespace gyre::test {

inline const Device& cpu() {
  static const Device device = Device::open("cpu");
  return device;
}

inline std::vector<uint8_t> bytes_of(const Tensor& tensor) { return values_of<uint8_t>(tensor); }

// `rows`, [tokens, kv_heads, head_dim], into a cache of any format.
inline void store(const Device& device, const Tensor& rows, const KvBuffer& cache,
                  const KvRange& where = {}) {
  if (!describe(cache.shape.format).compressed) {
    kv_copy(RunNow(device), {.k = rows, .k_cache = cache.codes.permute({1, 0, 2})}, where);
  } else if (cache.shape.role == KvRole::k) {
    kv_quantize(RunNow(device), {.k = rows, .k_cache = cache}, where);
  } else {
    kv_quantize(RunNow(device), {.v = rows, .v_cache = cache}, where);
  }
}

// A cache of one head that holds `rows`, each a token.
inline KvBuffer encoded(const Device& device, KvFormat format, uint64_t head_dim,
                        std::span<const float> rows, KvRole role = KvRole::k) {
  const uint64_t tokens = rows.size() / head_dim;
  const Tensor x = tensor_of(device, rows, {tokens, 1, head_dim});
  KvBuffer cache = KvBuffer::allocate(device, {format, role, 1, tokens, head_dim});
  store(device, x, cache);
  return cache;
}

// What a cache of any format holds, [capacity, kv_heads, head_dim].
inline std::vector<float> decoded(const Device& device, const KvBuffer& cache,
                                  const KvDequantizeOptions& options = {}) {
  const Tensor out =
      device.tensor(DType::f32, {cache.shape.capacity, cache.shape.kv_heads, cache.shape.head_dim});
  if (describe(cache.shape.format).compressed) {
    kv_dequantize(RunNow(device), {cache, out}, options);
  } else {
    kv_copy(RunNow(device), {.k = cache.codes.permute({1, 0, 2}), .k_cache = out});
  }
  return floats_of(out);
}

inline std::vector<float> gaussian_rows(uint64_t count, uint64_t head_dim, uint32_t seed) {
  std::mt19937 random(seed);
  return normal_floats(count * head_dim, random);
}

// Means over rows: |x - decoded|^2 / |x|^2, and the cosine between the two.
struct Distortion {
  double error = 0, cosine = 0;
};

inline Distortion distortion(std::span<const float> x, std::span<const float> y,
                             uint64_t head_dim) {
  Distortion mean;
  const uint64_t rows = x.size() / head_dim;
  for (uint64_t r = 0; r < rows; ++r) {
    double xx = 0, yy = 0, xy = 0, error = 0;
    for (uint64_t j = r * head_dim; j < (r + 1) * head_dim; ++j) {
      const double a = x[j], b = y[j];
      xx += a * a;
      yy += b * b;
      xy += a * b;
      error += (a - b) * (a - b);
    }
    mean.error += error / xx / static_cast<double>(rows);
    mean.cosine += xy / std::sqrt(xx * yy) / static_cast<double>(rows);
  }
  return mean;
}

inline Distortion round_trip(const Device& device, KvFormat format, uint64_t head_dim,
                             std::span<const float> rows) {
  return distortion(rows, decoded(device, encoded(device, format, head_dim, rows)), head_dim);
}

}  // namespace gyre::test
