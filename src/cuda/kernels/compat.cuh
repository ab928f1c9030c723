#pragma once
// The compatibility formats: what mlx-native writes, to the bit.
#include "cuda/kernels/attention/unpack.cuh"
#include "cuda/kernels/rotation.cuh"

namespace gyre::cuda {

constexpr uint32_t kCompatSlots = 2;    // chunks a lane: rows have up to 512 coordinates
constexpr uint32_t kCompatBlock = 256;  // at 512 each half has a norm, its root mean square

struct CompatBook {
  float centroids[256];
  float midpoints[256];
};

constexpr CompatBook compat_book(const float* half, const float* midpoints, uint32_t count) {
  CompatBook book{};
  for (uint32_t i = 0; i < count; ++i) {
    book.centroids[count + i] = half[i];
    book.centroids[count - 1 - i] = -half[i];
  }
  for (uint32_t i = 0; i + 1 < count; ++i) {  // the one in the middle is 0
    book.midpoints[count + i] = midpoints[i];
    book.midpoints[count - 2 - i] = -midpoints[i];
  }
  return book;
}

__device__ constexpr CompatBook kCompatBooks[4] = {
    compat_book(abi::kCompat4Centroids, abi::kCompat4Midpoints, 8),
    compat_book(abi::kCompat5Centroids, abi::kCompat5Midpoints, 16),
    compat_book(abi::kCompat6Centroids, abi::kCompat6Midpoints, 32),
    compat_book(abi::kCompat8Centroids, abi::kCompat8Midpoints, 128)};

__device__ inline bool compat_is_signed(uint32_t head_dim) {
  return head_dim == 256 || head_dim == 512;
}

// Squares of a chunk, one after the other, on top of `sum`.
__device__ inline float compat_squares(const float (&y)[kChunk], float sum) {
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) sum = sum + y[i] * y[i];
  return sum;
}

// Sums of lanes, halves added to halves, down to lanes that are `stop` apart.
__device__ inline float compat_tree(float sum, uint32_t lanes, uint32_t stop) {
  for (uint32_t delta = lanes / 2; delta >= stop; delta /= 2)
    sum = sum + __shfl_xor_sync(kAllLanes, sum, static_cast<int>(delta));
  return sum;
}

// In the order of mlx-native's threads: 32 have a row of 256 (a chunk each) or of 512 (two chunks
// each, and each half of the row has a norm), otherwise each has one coordinate; then halves are
// added to halves.
__device__ inline void compat_norms(const RowPlace<kCompatSlots>& at,
                                    const float (&y)[kCompatSlots][kChunk],
                                    float (&norm)[kCompatSlots]) {
  if (at.head_dim == 512) {
#pragma unroll
    for (uint32_t s = 0; s < kCompatSlots; ++s) {
      const float even = compat_squares(y[s], 0);
      const float both = compat_squares(y[s], __shfl_xor_sync(kAllLanes, even, 1));
      const float sum = compat_tree(both, 32, 2);  // right in odd lanes
      norm[s] = __fsqrt_rn(__shfl_sync(kAllLanes, sum, 1) / static_cast<float>(kCompatBlock));
    }
    return;
  }
  float sum = 0;
  if (at.head_dim == 256) {
    sum = compat_tree(compat_squares(y[0], 0) + compat_squares(y[1], 0), at.lanes, 1);
  } else {
    float part[kChunk];
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i)
      part[i] = compat_tree(y[0][i] * y[0][i] + y[1][i] * y[1][i], at.lanes, 1);
#pragma unroll
    for (uint32_t half = kChunk / 2; half != 0; half /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < half; ++i) part[i] = part[i] + part[i + half];
    }
    sum = part[0];
  }
  norm[0] = norm[1] = __fsqrt_rn(sum);
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
