#pragma once
// The mlx-native formats: what mlx-native writes, to the bit.
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/rotation.cuh"

namespace gyre::cuda {

constexpr uint32_t kMlxNativeBlock = 256;  // at 512 each half has a norm, its root mean square
constexpr uint32_t kShortRow = 4;          // the only row that is shorter than a chunk

struct MlxNativeBook {
  float centroids[256];
  float midpoints[256];
};

constexpr MlxNativeBook mlx_native_book(const float* half, const float* midpoints, uint32_t count) {
  MlxNativeBook book{};
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

__device__ constexpr MlxNativeBook kMlxNativeBooks[4] = {
    mlx_native_book(abi::kMlxNative4Centroids, abi::kMlxNative4Midpoints, 8),
    mlx_native_book(abi::kMlxNative5Centroids, abi::kMlxNative5Midpoints, 16),
    mlx_native_book(abi::kMlxNative6Centroids, abi::kMlxNative6Midpoints, 32),
    mlx_native_book(abi::kMlxNative8Centroids, abi::kMlxNative8Midpoints, 128)};

__device__ inline bool mlx_native_is_signed(uint32_t head_dim) {
  return head_dim == 256 || head_dim == 512;
}

// Squares of a chunk, one after the other, on top of `sum`.
__device__ inline float mlx_native_squares(const float (&y)[kChunk], float sum) {
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) sum = sum + y[i] * y[i];
  return sum;
}

// Sums of lanes, halves added to halves, down to lanes that are `stop` apart.
__device__ inline float mlx_native_tree(float sum, uint32_t lanes, uint32_t stop) {
  for (uint32_t delta = lanes / 2; delta >= stop; delta /= 2)
    sum = sum + __shfl_xor_sync(kAllLanes, sum, static_cast<int>(delta));
  return sum;
}

// The squares of coordinate i of each chunk of a lane, upper half added to lower half.
template <uint32_t kSlots>
__device__ float mlx_native_slot_squares(const float (&y)[kSlots][kChunk], uint32_t i) {
  float sum[kSlots];
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) sum[s] = y[s][i] * y[s][i];
#pragma unroll
  for (uint32_t half = kSlots / 2; half != 0; half /= 2) {
#pragma unroll
    for (uint32_t s = 0; s < half; ++s) sum[s] = sum[s] + sum[s + half];
  }
  return sum[0];
}

// In the order of mlx-native's threads: 32 have a row of 256 (a chunk each) or of 512 (two chunks
// each, and each half of the row has a norm), otherwise each has one coordinate; then halves are
// added to halves.
template <uint32_t kSlots>
__device__ void mlx_native_norms(const RowPlace<kSlots>& at, const float (&y)[kSlots][kChunk],
                                 float (&norm)[kSlots]) {
  if (at.head_dim == 512) {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      const float even = mlx_native_squares(y[s], 0);
      const float squares = mlx_native_squares(y[s], __shfl_xor_sync(kAllLanes, even, 1));
      const float sum = mlx_native_tree(squares, 32, 2);  // right in odd lanes
      norm[s] = __fsqrt_rn(__shfl_sync(kAllLanes, sum, 1) / static_cast<float>(kMlxNativeBlock));
    }
    return;
  }
  float sum = 0;
  if (at.head_dim == 256) {
    sum = mlx_native_tree(mlx_native_squares(y[0], 0) + mlx_native_squares(y[1], 0), at.lanes, 1);
  } else {
    float part[kChunk];
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i)
      part[i] = mlx_native_tree(mlx_native_slot_squares(y, i), at.lanes, 1);
#pragma unroll
    for (uint32_t half = kChunk / 2; half != 0; half /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < half; ++i) part[i] = part[i] + part[i + half];
    }
    sum = part[0];
  }
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) norm[s] = __fsqrt_rn(sum);
}

// mlx-native multiplies by the inverse at 256 and 512 and divides elsewhere; near a midpoint the
// difference decides.
__device__ inline float mlx_native_normalized(float y, float norm, uint32_t head_dim, float unit) {
  const bool short_row = !(norm > 1e-10f);
  if (mlx_native_is_signed(head_dim)) return y * (short_row ? 0.0f : __fdiv_rn(1.0f, norm)) * unit;
  return short_row ? 0.0f : __fdiv_rn(y, norm) * unit;
}

// Midpoints strictly below v. A tie goes down, NaN to 0.
__device__ inline uint32_t mlx_native_code(const MlxNativeBook& book, uint32_t bits, float v) {
  uint32_t code = 0;
  for (uint32_t step = 1u << (bits - 1); step != 0; step /= 2) {
    if (book.midpoints[code + step - 1] < v) code += step;
  }
  return code;
}

// x: as loaded. codes and norms are the row's; nothing is stored of one that is not there.
template <uint32_t kSlots>
__device__ void mlx_native_encode(uint32_t format, const abi::KvCacheLayout& cache,
                                  const RowPlace<kSlots>& at, float (&x)[kSlots][kChunk],
                                  uint8_t* codes, float* norms, bool present) {
  if (mlx_native_is_signed(at.head_dim)) flip_signs(at, kMlxNativeSigns, x);
  transform<true>(at, x);
  scale_transformed(at, x);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {  // what is beyond the row is summed with the rest
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) x[s][i] = at.begin(s) + i < at.head_dim ? x[s][i] : 0.0f;
  }
  float norm[kSlots];
  mlx_native_norms(at, x, norm);
  if (!present) return;
  const MlxNativeBook& book = kMlxNativeBooks[format - abi::kMlxNative4];
  const uint32_t bits = abi::kv_bits(format);
  const float unit = mlx_native_unit(cache);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (!at.active(s)) continue;
    const uint32_t block = at.begin(s) / kMlxNativeBlock;
    if (at.begin(s) % kMlxNativeBlock == 0 && block < abi::kv_mlx_native_norms(at.head_dim))
      norms[block] = norm[s];
#pragma unroll
    for (uint32_t i = 0; i < kChunk; i += 2) {
      const uint32_t j = at.begin(s) + i;
      if (j >= at.head_dim) break;
      const uint32_t even =
          mlx_native_code(book, bits, mlx_native_normalized(x[s][i], norm[s], at.head_dim, unit));
      const uint32_t odd = mlx_native_code(
          book, bits, mlx_native_normalized(x[s][i + 1], norm[s], at.head_dim, unit));
      if (format == abi::kMlxNative4) {
        codes[j / 2] = static_cast<uint8_t>(even | odd << 4);
      } else {
        codes[j] = static_cast<uint8_t>(even), codes[j + 1] = static_cast<uint8_t>(odd);
      }
    }
  }
}

// A row of the source to codes and norms; the lanes of one that is not there take part.
template <uint32_t kFormat, uint32_t kSlots, class Row>
__device__ void mlx_native_store_slots(const abi::KvCacheLayout& cache, const Row& row,
                                       uint8_t* codes, float* norms) {
  const RowPlace<kSlots> at(cache.head_dim);
  float x[kSlots][kChunk] = {};
  if (row.present() && cache.head_dim >= kChunk) {
    row.load(at, x);
  } else if (row.present() && at.lane == 0) {
    float first[kShortRow];
    load_floats(row.row, first);
#pragma unroll
    for (uint32_t i = 0; i < kShortRow; ++i) x[0][i] = first[i];
  }
  mlx_native_encode(kFormat, cache, at, x, codes, norms, row.present());
}
// A function of its own: what it needs takes no registers from others.
template <uint32_t kFormat, class Row>
__device__ __noinline__ void mlx_native_store_long(const abi::KvCacheLayout& cache, Row row,
                                                   uint8_t* codes, float* norms) {
  mlx_native_store_slots<kFormat, kManySlots>(cache, row, codes, norms);
}
template <uint32_t kFormat, class Row>
__device__ void mlx_native_store(const abi::KvCacheLayout& cache, const Row& row, uint8_t* codes,
                                 float* norms) {
  if constexpr (kFormat == abi::kMlxNative4) {
    if (takes_many_slots(cache.head_dim))
      return mlx_native_store_long<kFormat>(cache, row, codes, norms);
  }
  mlx_native_store_slots<kFormat, kFewSlots>(cache, row, codes, norms);
}

// Rotated coordinates.
template <uint32_t kSlots>
__device__ void mlx_native_decode(uint32_t format, const abi::KvCacheLayout& cache,
                                  const RowPlace<kSlots>& at, const uint8_t* codes,
                                  const float* norms, float (&y)[kSlots][kChunk]) {
  const MlxNativeBook& book = kMlxNativeBooks[format - abi::kMlxNative4];
  const float unit = mlx_native_unit(cache);
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) {
      const uint32_t j = at.begin(s) + i;
      y[s][i] = 0;
      if (j >= at.head_dim) continue;
      const uint32_t code = mlx_native_stored_code(format, codes, j);
      const float norm = norms[at.head_dim == 512 ? j / kMlxNativeBlock : 0];
      y[s][i] = __fdiv_rn(book.centroids[code] * norm, unit);
    }
  }
}

// A row that is shorter than a chunk.
template <class T, uint32_t kSlots>
__device__ void store_short_row(const RowPlace<kSlots>& at, const float (&y)[kSlots][kChunk],
                                T* row) {
  float first[kShortRow];
#pragma unroll
  for (uint32_t i = 0; i < kShortRow; ++i) first[i] = y[0][i];
  if (at.lane == 0) store_floats(first, row);
}

}  // namespace gyre::cuda
