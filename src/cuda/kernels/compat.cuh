#pragma once
// The compatibility formats: what mlx-native writes. Not for speed: the sum of squares
// runs through a row coordinate by coordinate.
#include "cuda/kernels/attention/unpack.cuh"
#include "cuda/kernels/rotation.cuh"

namespace gyre::cuda {

constexpr uint32_t kCompatSlots = 2;    // chunks a lane: rows have up to 512 coordinates
constexpr uint32_t kCompatBlock = 256;  // at 512 each half has a norm, its root mean square

struct CompatBook {
  float centroids[256];
  float midpoints[256];
};

// Midpoints are rounded to seven decimals, as mlx-native has them.
constexpr CompatBook compat_book(const float* half, uint32_t count) {
  CompatBook book{};
  for (uint32_t i = 0; i < count; ++i) {
    book.centroids[count + i] = half[i];
    book.centroids[count - 1 - i] = -half[i];
  }
  for (uint32_t i = 0; i + 1 < 2 * count; ++i) {
    const double middle =
        (static_cast<double>(book.centroids[i]) + static_cast<double>(book.centroids[i + 1])) / 2 *
        1e7;
    const auto nearest = static_cast<int64_t>(middle + (middle < 0 ? -0.5 : 0.5));
    book.midpoints[i] = static_cast<float>(static_cast<double>(nearest) / 1e7);
  }
  return book;
}

__device__ constexpr CompatBook kCompatBooks[4] = {
    compat_book(abi::kCompat4Centroids, 8), compat_book(abi::kCompat5Centroids, 16),
    compat_book(abi::kCompat6Centroids, 32), compat_book(abi::kCompat8Centroids, 128)};

__device__ inline bool compat_is_signed(uint32_t head_dim) {
  return head_dim == 256 || head_dim == 512;
}

__device__ inline void compat_norms(const RowPlace<kCompatSlots>& at,
                                    const float (&y)[kCompatSlots][kChunk],
                                    float (&norm)[kCompatSlots]) {
  const uint32_t first = threadIdx.x & 31 & ~(at.lanes - 1);
  float sum = 0;
#pragma unroll
  for (uint32_t s = 0; s < kCompatSlots; ++s) {
    if (at.head_dim == 512) sum = 0;
    for (uint32_t lane = 0; lane < at.lanes; ++lane) {
      float mine = sum;
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i) mine = mine + y[s][i] * y[s][i];
      sum = __shfl_sync(kAllLanes, mine, static_cast<int>(first + lane));
    }
    norm[s] = __fsqrt_rn(at.head_dim == 512 ? sum / static_cast<float>(kCompatBlock) : sum);
  }
  if (at.head_dim != 512) norm[0] = norm[1];
}

// mlx-native multiplies by the inverse at 256 and 512 and divides elsewhere; near a midpoint the
// difference decides.
__device__ inline float compat_normalized(float y, float norm, uint32_t head_dim) {
  const bool short_row = !(norm > 1e-10f);
  if (compat_is_signed(head_dim))
    return y * (short_row ? 0.0f : __fdiv_rn(1.0f, norm)) * compat_unit(head_dim);
  return short_row ? 0.0f : __fdiv_rn(y, norm) * compat_unit(head_dim);
}

// Midpoints strictly below v. A tie goes down, NaN to 0.
__device__ inline uint32_t compat_code(const CompatBook& book, uint32_t bits, float v) {
  uint32_t code = 0;
  for (uint32_t step = 1u << (bits - 1); step != 0; step /= 2) {
    if (book.midpoints[code + step - 1] < v) code += step;
  }
  return code;
}

// x: as loaded. codes and norms are the row's; nothing is stored of one that is not there.
__device__ inline void compat_encode(uint32_t format, const RowPlace<kCompatSlots>& at,
                                     float (&x)[kCompatSlots][kChunk], uint8_t* codes, float* norms,
                                     bool present) {
  if (compat_is_signed(at.head_dim)) flip_signs(at, kCompatSigns, x);
  transform<true>(at, x);
  scale_transformed(at, x);
#pragma unroll
  for (uint32_t s = 0; s < kCompatSlots; ++s) {  // lanes beyond the row are summed with the others
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) x[s][i] = at.active(s) ? x[s][i] : 0.0f;
  }
  float norm[kCompatSlots];
  compat_norms(at, x, norm);
  if (!present) return;
  const CompatBook& book = kCompatBooks[format - abi::kCompat4];
#pragma unroll
  for (uint32_t s = 0; s < kCompatSlots; ++s) {
    if (!at.active(s)) continue;
    if (at.begin(s) % kCompatBlock == 0) norms[at.begin(s) / kCompatBlock] = norm[s];
#pragma unroll
    for (uint32_t i = 0; i < kChunk; i += 2) {
      const uint32_t bits = abi::kv_bits(format), j = at.begin(s) + i;
      const uint32_t even =
          compat_code(book, bits, compat_normalized(x[s][i], norm[s], at.head_dim));
      const uint32_t odd =
          compat_code(book, bits, compat_normalized(x[s][i + 1], norm[s], at.head_dim));
      if (format == abi::kCompat4) {
        codes[j / 2] = static_cast<uint8_t>(even | odd << 4);
      } else {
        codes[j] = static_cast<uint8_t>(even), codes[j + 1] = static_cast<uint8_t>(odd);
      }
    }
  }
}

// Rotated coordinates.
__device__ inline void compat_decode(uint32_t format, const RowPlace<kCompatSlots>& at,
                                     const uint8_t* codes, const float* norms,
                                     float (&y)[kCompatSlots][kChunk]) {
  const CompatBook& book = kCompatBooks[format - abi::kCompat4];
#pragma unroll
  for (uint32_t s = 0; s < kCompatSlots; ++s) {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) {
      const uint32_t j = at.begin(s) + i;
      y[s][i] = 0;
      if (!at.active(s)) continue;
      const uint32_t code = compat_stored_code(format, codes, j);
      const float norm = norms[at.head_dim == 512 ? j / kCompatBlock : 0];
      y[s][i] = __fdiv_rn(book.centroids[code] * norm, compat_unit(at.head_dim));
    }
  }
}

}  // namespace gyre::cuda
