#pragma once
// The mlx-native formats: what mlx-native writes, by a simdgroup. They are for reading and
// writing its caches, not for speed.
#include "metal/kernels/mlx_native_levels.h"
#include "metal/kernels/native_codes.h"

namespace gyre {
namespace metal {

inline float mlx_native_midpoint(uint format, uint i) {
  if (format == abi::kMlxNative4) return abi::kMlxNative4Midpoints[i];
  if (format == abi::kMlxNative5) return abi::kMlxNative5Midpoints[i];
  return format == abi::kMlxNative6 ? abi::kMlxNative6Midpoints[i] : abi::kMlxNative8Midpoints[i];
}

// Index of the nearest centroid: midpoints strictly below v. A tie goes down, NaN to 0.
inline uint mlx_native_code(uint format, float v) {
  const uint count = mlx_native_half(format);
  const float magnitude = fabs(v);
  const bool positive = v > 0.0f;
  uint below = 0;  // midpoints of the half that are below it; for negative numbers, or at it
  for (uint step = count / 2; step != 0; step /= 2) {
    const float midpoint = mlx_native_midpoint(format, below + step - 1);
    if (positive ? midpoint < magnitude : midpoint <= magnitude) below += step;
  }
  if (isnan(v)) return 0;
  return positive ? count + below : count - 1 - below;
}

// Where the squares of a part's coordinates are added as mlx-native's threads do: at 256 and 512
// each of 32 threads has head_dim / 32 neighbours, so some lanes here, one after the other; the
// last of them has the sum.
inline float mlx_native_chain(const thread float* y, uint lanes, uint lane) {
  float sum = 0;
  for (uint turn = 0; turn < lanes; ++turn) {
    const float before = simd_shuffle_up(sum, static_cast<ushort>(1));
    float own = turn == 0 ? 0.0f : before;
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) own = own + y[k] * y[k];
    if (lane % lanes == turn) sum = own;
  }
  return sum;
}
// The sum of squares of a block, for every lane: a row, or half of one of 512, which begins at part
// `first`.
inline float mlx_native_sum(const thread Row& row, uint first, uint head_dim, uint lane) {
  if (head_dim == 256 || head_dim == 512) {
    const uint lanes = head_dim / 128;
    float sum = mlx_native_chain(row.y[first], lanes, lane) +
                mlx_native_chain(row.y[first + 1], lanes, lane);
    for (uint step = kLanes / 2; step >= lanes; step /= 2) sum = plus_lanes(sum, step, true);
    return simd_shuffle(sum, static_cast<ushort>(lanes - 1));
  }
  float squares[4];
  GYRE_UNROLL
  for (uint k = 0; k < 4; ++k) {
    float part[kRowParts];
    GYRE_UNROLL
    for (uint j = 0; j < kRowParts; ++j)
      part[j] = kPart * j < head_dim ? row.y[j][k] * row.y[j][k] : 0.0f;
    GYRE_UNROLL
    for (uint stage = kPartStages; stage != 0; --stage) {
      const uint apart = 1u << (stage - 1);
      GYRE_UNROLL
      for (uint j = 0; j < kRowParts / 2; ++j)
        part[j] = j < apart ? part[j] + part[j + apart] : part[j];
    }
    squares[k] = part[0];
    for (uint step = kLanes / 2; step != 0; step /= 2)
      squares[k] = plus_lanes(squares[k], step, 4 * step < head_dim);
  }
  return (squares[0] + squares[2]) + (squares[1] + squares[3]);
}

inline float mlx_native_normalized(float y, float norm, uint head_dim, float unit) {
  const bool is_short = !(norm > 1e-10f);
  if (head_dim == 256 || head_dim == 512) return y * (is_short ? 0.0f : 1.0f / norm) * unit;
  return is_short ? 0.0f : y / norm * unit;
}

// Codes of a row, and its norms as floats' bits in `scale`.
template <class Rows>
void encode_mlx_native_row(const thread Rows& rows, uint format, constant abi::KvCacheLayout& cache,
                           uint lane, thread RowCodes& out) {
  const uint head_dim = cache.head_dim;
  const float unit = mlx_native_unit(head_dim, cache.scale_factor);
  Row row;
  load_row(rows, head_dim, lane, row);
  flip_signs(row, signs_of(format, head_dim), head_dim, lane);
  transform_inner(row, head_dim);
  transform_outer(row, head_dim, lane);
  scale_blocks(row, head_dim, lane);
  const uint block_parts = head_dim == 512 ? 2 : kRowParts;
  float norm = 0;
  GYRE_UNROLL
  for (uint first = 0; first < kRowParts; first += 2) {
    if (kPart * first >= head_dim) continue;
    if (first % block_parts == 0) {
      const float sum = mlx_native_sum(row, first, head_dim, lane);
      norm = precise::sqrt(head_dim == 512 ? sum / 256.0f : sum);
    }
    GYRE_UNROLL
    for (uint j = first; j < first + 2; ++j) {
      if (kPart * j >= head_dim) continue;
      out.scale[j] = as_type<uint>(norm);
      out.codes[j] = 0;
      GYRE_UNROLL
      for (uint k = 0; k < 4; ++k)
        out.codes[j] |=
            mlx_native_code(format, mlx_native_normalized(row.y[j][k], norm, head_dim, unit))
            << (8 * k);
    }
  }
}

// A rotated coordinate.
inline float decode_mlx_native(constant abi::KvCacheLayout& cache, uint format, uint code,
                               float norm) {
  return mlx_native_level(format, code) * norm /
         mlx_native_unit(cache.head_dim, cache.scale_factor);
}

}  // namespace metal
}  // namespace gyre
