// hadamard: see abi/hadamard.h. Rows of up to 1024 points are a simdgroup's; of longer ones each
// simdgroup of the group has 1024 points, and the stages between these are taken in the group's
// memory.
#include "abi/hadamard.h"
#include "metal/kernels/row.h"

namespace gyre {
namespace metal {

constant constexpr uint kLongest = 8192;

// Stages 1024 and up: a thread has all points at one place of the simdgroups' rows.
inline void transform_across(threadgroup float* points, uint head_dim, uint index, uint threads) {
  constexpr uint kMax = kLongest / abi::kKvMaxHeadDim;
  for (uint at = index; at < abi::kKvMaxHeadDim; at += threads) {
    float y[kMax];
    for (uint i = 0; i < kMax; ++i)
      y[i] = i * abi::kKvMaxHeadDim < head_dim ? points[i * abi::kKvMaxHeadDim + at] : 0.0f;
    for (uint apart = 1; apart < kMax; apart *= 2) {
      if (apart * abi::kKvMaxHeadDim >= head_dim) continue;
      for (uint i = 0; i < kMax; ++i)
        if ((i & apart) == 0) butterfly(y[i], y[i + apart]);
    }
    for (uint i = 0; i < kMax; ++i)
      if (i * abi::kKvMaxHeadDim < head_dim) points[i * abi::kKvMaxHeadDim + at] = y[i];
  }
}

struct SharedPoints {
  threadgroup const float* at;

  float get(uint coordinate) const { return at[coordinate]; }
};

// A simdgroup's 1024 points of a longer row, which has no signs.
inline void transform_long(thread Row& row, uint head_dim, const thread Grid& grid) {
  threadgroup float* const points = reinterpret_cast<threadgroup float*>(grid.shared);
  threadgroup float* const own = points + grid.simdgroup * abi::kKvMaxHeadDim;
  transform_outer(row, abi::kKvMaxHeadDim, grid.lane);
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) GYRE_UNROLL
  for (uint k = 0; k < 4; ++k) own[lane_coordinate(j, grid.lane) + k] = row.y[j][k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  transform_across(points, head_dim, grid.index, grid.threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const SharedPoints from = {own};
  load_row(from, abi::kKvMaxHeadDim, grid.lane, row);
  transform_inner(row, abi::kKvMaxHeadDim);
  const float factor = transform_factor(head_dim);
  GYRE_UNROLL
  for (uint j = 0; j < kRowParts; ++j) GYRE_UNROLL
  for (uint k = 0; k < 4; ++k) row.y[j][k] = row.y[j][k] * factor;
}

}  // namespace metal
}  // namespace gyre

kernel void hadamard(constant gyre::abi::HadamardParams& p [[buffer(0)]],
                     const device uchar* x [[buffer(1)]], device uchar* out [[buffer(2)]],
                     GYRE_GRID_ARGUMENTS) {
  using namespace gyre::metal;
  const Grid grid = GYRE_GRID;
  const uint x_dtype = spec_byte(0), out_dtype = spec_byte(1);
  const bool is_long = p.head_dim > gyre::abi::kKvMaxHeadDim;
  const ulong at = is_long ? group.x : ulong(group.x) * (threads.x / kLanes) + simdgroup;
  if (at >= p.rows[0] * p.rows[1]) return;
  const ulong outer = at / p.rows[1], inner = at - outer * p.rows[1];
  // What of the row is this simdgroup's.
  const uint first = is_long ? simdgroup * gyre::abi::kKvMaxHeadDim : 0;
  const uint count = is_long ? gyre::abi::kKvMaxHeadDim : p.head_dim;
  const TensorRow from = {
      x + outer * p.x_stride[0] + inner * p.x_stride[1] + first * float_bytes(x_dtype), x_dtype};
  Row row;
  load_row(from, count, lane, row);
  if (is_long) {
    transform_long(row, p.head_dim, grid);
  } else {
    if (p.inverse == 0) flip_signs(row, p.signs, count, lane);
    transform(row, count, lane);
    scale_blocks(row, count, lane);
    if (p.inverse != 0) flip_signs(row, p.signs, count, lane);
  }
  store_row(
      row, count, lane,
      out + outer * p.out_stride[0] + inner * p.out_stride[1] + first * float_bytes(out_dtype),
      out_dtype);
}
