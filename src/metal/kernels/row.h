#pragma once
// A head's row in the registers of a simdgroup, and its rotation (docs/kv_formats.md): signs, then
// the Walsh-Hadamard transform of each power-of-two block. Lane l has coordinates 128 j + 4 l + k,
// k below 4, of each part j. So stages 1 and 2 stay in a lane, stages 4 to 64 are shuffles, and
// larger ones stay in a lane again. Loops over parts have a fixed count, for every compiler to
// unroll. Parts beyond the row hold nothing.
#include "abi/kv_codec.h"
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

constant constexpr uint kPart = 4 * kLanes;  // coordinates
constant constexpr uint kPartStages = 3;     // of a transform over the largest head's parts
constant constexpr uint kRowParts = 1u << kPartStages;
static_assert(kRowParts * kPart == abi::kKvMaxHeadDim, "a row holds the largest head");

struct Row {
  float y[kRowParts][4];
};

// The part's first coordinate with a lane.
inline uint lane_coordinate(uint part, uint lane) { return kPart * part + 4 * lane; }

// Points of the transform block that a coordinate belongs to. Blocks are powers of two, largest
// first: the highest bit in which the coordinate and head_dim differ. 0: not in the row.
inline uint block_points(uint coordinate, uint head_dim) {
  return coordinate < head_dim ? 0x80000000u >> clz(coordinate ^ head_dim) : 0;
}

// Rows: float get(uint coordinate) const.
template <class Rows>
void load_row(const thread Rows& rows, uint head_dim, uint lane, thread Row& row) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    const uint first = lane_coordinate(j, lane);
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) row.y[j][k] = first + k < head_dim ? rows.get(first + k) : 0.0f;
  }
}
inline void store_row(const thread Row& row, uint head_dim, uint lane, device uchar* to,
                      uint dtype) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint first = lane_coordinate(j, lane);
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k)
      if (first + k < head_dim) store_float(to, dtype, first + k, row.y[j][k]);
  }
}

// A row of floats in a tensor.
struct TensorRow {
  const device uchar* at;
  uint dtype;

  float get(uint coordinate) const { return load_float(at, dtype, coordinate); }
};

// The bits as they are where dtypes are the same, a NaN's too.
inline void copy_float(const thread TensorRow& from, uint i, device uchar* to, uint dtype) {
  if (from.dtype != dtype) {
    store_float(to, dtype, i, from.get(i));
  } else if (dtype == kF32) {
    pointer<uint>(to)[i] = pointer<uint>(from.at)[i];
  } else {
    pointer<ushort>(to)[i] = pointer<ushort>(from.at)[i];
  }
}

// HadamardSigns values.
constant constexpr uint kSignsNone = 0, kSignsNative = 1, kSignsMlxNative = 2;

// Signs that a compressed format flips.
inline uint signs_of(uint format, uint head_dim) {
  if (abi::kv_is_native(format)) return kSignsNative;
  return head_dim == 256 || head_dim == 512 ? kSignsMlxNative : kSignsNone;
}

inline void flip_signs(thread Row& row, uint signs, uint head_dim, uint lane) {
  if (signs == kSignsNone) return;
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint first = lane_coordinate(j, lane);
    if (first >= head_dim) continue;
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) {
      const uint c = first + k;
      const uint flip = signs == kSignsNative ? abi::kv_sign_bit(c)
                                              : abi::kMlxNativeSigns[c / 8 % 64] >> (c % 8) & 1u;
      row.y[j][k] = as_type<float>(as_type<uint>(row.y[j][k]) ^ flip << 31);
    }
  }
}

// Two halves of a block: (a + b, a - b).
inline void butterfly(thread float& a, thread float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Stages 1 and 2, in a lane.
inline void transform_inner(thread Row& row, uint head_dim) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    if (kPart * j >= head_dim) continue;
    butterfly(row.y[j][0], row.y[j][1]);
    butterfly(row.y[j][2], row.y[j][3]);
    if (head_dim < 4) continue;
    butterfly(row.y[j][0], row.y[j][2]);
    butterfly(row.y[j][1], row.y[j][3]);
  }
}

// Stages 4 and up, of blocks that are larger.
inline void transform_outer(thread Row& row, uint head_dim, uint lane) {
  for (uint step = 1; step < kLanes; step *= 2) {
    GYRE_UNROLL
    for (uint j = 0; j < kRowParts; ++j) {
      if (kPart * j >= head_dim) continue;
      const bool upper = (lane & step) != 0;
      const bool inside = 4 * step < block_points(lane_coordinate(j, lane), head_dim);
      GYRE_UNROLL
      for (uint k = 0; k < 4; ++k) {
        const float own = row.y[j][k], other = simd_shuffle_xor(own, static_cast<ushort>(step));
        const float combined = upper ? other - own : own + other;
        row.y[j][k] = inside ? combined : own;
      }
    }
  }
  GYRE_UNROLL
  for (uint stage = 0; stage < kPartStages; ++stage) {
    const uint apart = 1u << stage;
    GYRE_UNROLL
    for (uint j = 0; j < kRowParts; ++j) {
      if ((j & apart) != 0 || block_points(kPart * j, head_dim) <= kPart * apart) continue;
      GYRE_UNROLL
      for (uint k = 0; k < 4; ++k) butterfly(row.y[j][k], row.y[j + apart][k]);
    }
  }
}

// Without the factor 1 / sqrt(points).
inline void transform(thread Row& row, uint head_dim, uint lane) {
  transform_outer(row, head_dim, lane);
  transform_inner(row, head_dim);
}

inline float transform_factor(uint points) {
  return 1.0f / precise::sqrt(static_cast<float>(points));
}
inline void scale_blocks(thread Row& row, uint head_dim, uint lane) {
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) {
    const uint points = block_points(lane_coordinate(j, lane), head_dim);
    if (points == 0) continue;
    const float factor = transform_factor(points);
    GYRE_UNROLL
    for (uint k = 0; k < 4; ++k) row.y[j][k] = row.y[j][k] * factor;
  }
}

// From plain coordinates to a format's rotated ones, up to rounding in another order than
// encoding's.
inline void rotate_row(thread Row& row, uint format, uint head_dim, uint lane) {
  flip_signs(row, signs_of(format, head_dim), head_dim, lane);
  transform(row, head_dim, lane);
  scale_blocks(row, head_dim, lane);
}
// From a format's rotated coordinates to plain ones.
inline void restore_row(thread Row& row, uint format, uint head_dim, uint lane) {
  transform(row, head_dim, lane);
  scale_blocks(row, head_dim, lane);
  flip_signs(row, signs_of(format, head_dim), head_dim, lane);
}

inline ulong shuffle_ulong(ulong value, uint from) {
  const ushort at = static_cast<ushort>(from);
  const uint low = simd_shuffle(static_cast<uint>(value), at);
  const uint high = simd_shuffle(static_cast<uint>(value >> 32), at);
  return static_cast<ulong>(high) << 32 | low;
}

}  // namespace metal
}  // namespace gyre
