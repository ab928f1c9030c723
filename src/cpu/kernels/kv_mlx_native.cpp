// The mlx-native formats, in scalar code: they are for reading and writing mlx-native's
// caches, not for speed.
#include "cpu/kernels/kv_mlx_native.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "abi/kv_codec.h"
#include "abi/kv_mlx_native.h"
#include "cpu/kernels/kv_signs.h"

namespace gyre::cpu {
namespace {

// Positive halves, as abi/kv_mlx_native.h has them.
struct HalfBook {
  std::span<const float> centroids, midpoints;
};

HalfBook half_book(uint32_t format) {
  switch (format) {
    case abi::kMlxNative4:
      return {abi::kMlxNative4Centroids, abi::kMlxNative4Midpoints};
    case abi::kMlxNative5:
      return {abi::kMlxNative5Centroids, abi::kMlxNative5Midpoints};
    case abi::kMlxNative6:
      return {abi::kMlxNative6Centroids, abi::kMlxNative6Midpoints};
    default:
      return {abi::kMlxNative8Centroids, abi::kMlxNative8Midpoints};
  }
}

// No memory of the heap: tasks make it, and they may not fail.
struct Codebook {
  uint32_t size = 0;
  std::array<float, 256> centroids{};
  std::array<float, 255> midpoints{};
};

Codebook make_codebook(uint32_t format) {
  const HalfBook half = half_book(format);
  const size_t count = half.centroids.size();
  Codebook book;
  book.size = static_cast<uint32_t>(2 * count);
  for (size_t i = 0; i < count; ++i) {
    book.centroids[count + i] = half.centroids[i];
    book.centroids[count - 1 - i] = -half.centroids[i];
  }
  for (size_t i = 0; i + 1 < count; ++i) {  // the one in the middle is 0
    book.midpoints[count + i] = half.midpoints[i];
    book.midpoints[count - 2 - i] = -half.midpoints[i];
  }
  return book;
}

const Codebook& codebook(uint32_t format) {
  static const Codebook kBooks[] = {
      make_codebook(abi::kMlxNative4), make_codebook(abi::kMlxNative5),
      make_codebook(abi::kMlxNative6), make_codebook(abi::kMlxNative8)};
  return kBooks[format - abi::kMlxNative4];
}

// Index of the nearest centroid: midpoints strictly below v. A tie goes down, NaN to 0.
uint8_t nearest(const Codebook& book, float v) {
  const auto midpoints = std::span(book.midpoints).first(book.size - 1);
  const auto below =
      std::ranges::partition_point(midpoints, [&](float midpoint) { return midpoint < v; });
  return static_cast<uint8_t>(below - midpoints.begin());
}

void transform(float* y, uint32_t n) {
  for (uint32_t h = 1; h < n; h *= 2) {
    for (uint32_t j = 0; j < n; ++j) {
      if ((j & h) != 0) continue;
      const float a = y[j], b = y[j + h];
      y[j] = a + b;
      y[j + h] = a - b;
    }
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (uint32_t j = 0; j < n; ++j) y[j] *= factor;
}

// `n` coordinates in the order of mlx-native's threads: each sums the squares of `each` neighbours
// one after the other, then halves are added to halves.
float sum_of_squares(const float* y, uint32_t n, uint32_t each) {
  float part[abi::kKvMaxHeadDim];
  uint32_t parts = n / each;
  for (uint32_t t = 0; t < parts; ++t) {
    part[t] = 0;
    for (uint32_t j = t * each; j < (t + 1) * each; ++j) part[t] += y[j] * y[j];
  }
  for (parts /= 2; parts != 0; parts /= 2) {
    for (uint32_t t = 0; t < parts; ++t) part[t] += part[t + parts];
  }
  return part[0];
}

constexpr uint32_t kRmsBlock = 256;  // two norms at 512, each the RMS of its half
constexpr float kTiny = 1e-10f;

// What a normalised coordinate is multiplied with: to have variance 1, but at 512 as the cache
// says.
float unit_of(const abi::KvCacheLayout& cache) {
  return cache.head_dim == 512 ? cache.scale_factor : std::sqrt(static_cast<float>(cache.head_dim));
}

// mlx-native multiplies by the inverse at 256 and 512 and divides elsewhere; near a midpoint the
// difference decides.
float normalized(float y, float norm, uint32_t head_dim, float unit) {
  const bool short_row = !(norm > kTiny);
  if (head_dim == 256 || head_dim == 512) return y * (short_row ? 0.0f : 1.0f / norm) * unit;
  return short_row ? 0.0f : y / norm * unit;
}

}  // namespace

bool mlx_native_is_signed(uint32_t /*format*/, uint32_t head_dim) {
  return head_dim == 256 || head_dim == 512;
}

void encode_mlx_native(const abi::KvCacheLayout& cache, const float* x, uint8_t* codes,
                       float* norms) {
  const uint32_t format = cache.format, head_dim = cache.head_dim;
  float y[abi::kKvMaxHeadDim];
  std::copy_n(x, head_dim, y);
  if (mlx_native_is_signed(format, head_dim)) {
    const SignMasks& signs = mlx_native_signs();
    for (uint32_t j = 0; j < head_dim; ++j) y[j] = signs[j] != 0 ? -y[j] : y[j];
  }
  transform(y, head_dim);
  const Codebook& book = codebook(format);
  const float unit = unit_of(cache);
  const uint32_t block = head_dim == 512 ? kRmsBlock : head_dim;
  for (uint32_t begin = 0; begin < head_dim; begin += block) {
    // 32 threads have a row of 256 or 512, otherwise each has one coordinate.
    const bool few_threads = mlx_native_is_signed(format, head_dim);
    const float sum = sum_of_squares(y + begin, block, few_threads ? head_dim / 32 : 1);
    const float norm = std::sqrt(head_dim == 512 ? sum / kRmsBlock : sum);
    norms[begin / block] = norm;
    for (uint32_t j = begin; j < begin + block; ++j) {
      codes[j] = nearest(book, normalized(y[j], norm, head_dim, unit));
    }
  }
}

void decode_mlx_native(const abi::KvCacheLayout& cache, const uint8_t* codes, const float* norms,
                       float* y) {
  const Codebook& book = codebook(cache.format);
  const uint32_t block = cache.head_dim == 512 ? kRmsBlock : cache.head_dim;
  const float unit = unit_of(cache);
  for (uint32_t j = 0; j < cache.head_dim; ++j)
    y[j] = book.centroids[codes[j] & (book.size - 1)] * norms[j / block] / unit;
}

}  // namespace gyre::cpu
