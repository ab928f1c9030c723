#pragma once
// The Walsh-Hadamard transform and the signs of a row that lies in registers. A row is cut into
// chunks of 8 coordinates; chunk c is slot c / lanes of lane c % lanes, so that loads coalesce,
// near partners meet by shuffles and far ones in registers. Several rows share a warp; every lane
// of the warp must take part. Sums and differences are those of docs/kv_formats.md, one by one.
#include "abi/kv_codec.h"
#include "cuda/kernels/block_work.cuh"

namespace gyre::cuda {

template <uint32_t kSlots>
struct RowPlace {
  uint32_t head_dim;
  uint32_t lanes;
  uint32_t lane;          // in the row
  uint32_t first;         // slot: those of a long row are taken one by one
  uint32_t size[kSlots];  // points of the transform that a slot's chunk is part of
  bool whole;             // one transform

  __device__ explicit RowPlace(uint32_t dim, uint32_t first_slot = 0)
      : head_dim(dim),
        lanes(row_lanes(dim, kSlots)),
        lane(threadIdx.x & (lanes - 1)),
        first(first_slot) {
    whole = (dim & (dim - 1)) == 0;
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      // Blocks come largest first: the first bit that differs from head_dim is the block's size.
      size[s] = active(s) ? 0x80000000u >> __clz(static_cast<int>(begin(s) ^ dim)) : 0;
      if (whole) size[s] = dim;
    }
  }
  __device__ uint32_t begin(uint32_t slot) const {
    return ((first + slot) * lanes + lane) * kChunk;
  }
  __device__ bool active(uint32_t slot) const { return begin(slot) < head_dim; }
};

// A byte a chunk, coordinate 8 c + i in bit i.
struct SignBytes {
  uint8_t of[abi::kKvMaxHeadDim / kChunk];
};
constexpr SignBytes native_sign_bytes() {
  SignBytes signs{};
  for (uint32_t j = 0; j < abi::kKvMaxHeadDim; ++j)
    signs.of[j / kChunk] =
        static_cast<uint8_t>(signs.of[j / kChunk] | abi::kv_sign_bit(j) << (j % kChunk));
  return signs;
}
constexpr SignBytes mlx_native_sign_bytes() {
  SignBytes signs{};
  for (uint32_t i = 0; i < sizeof(abi::kMlxNativeSigns); ++i) signs.of[i] = abi::kMlxNativeSigns[i];
  return signs;
}
__device__ constexpr SignBytes kNativeSigns = native_sign_bytes();
__device__ constexpr SignBytes kMlxNativeSigns = mlx_native_sign_bytes();

template <uint32_t kSlots>
__device__ void flip_signs(const RowPlace<kSlots>& at, const SignBytes& signs,
                           float (&y)[kSlots][kChunk]) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const uint32_t bits = at.active(s) ? signs.of[at.begin(s) / kChunk] : 0u;
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i)
      y[s][i] = __uint_as_float(__float_as_uint(y[s][i]) ^ (bits << (31 - i) & 0x80000000u));
  }
}

__device__ inline void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Stage `kStep` inside a chunk.
template <uint32_t kStep>
__device__ void stage_inside(float (&y)[kChunk]) {
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) {
    if ((i & kStep) == 0) butterfly(y[i], y[i | kStep]);
  }
}

// Stage of `step` chunks between lanes: the lower one gets y + other, the upper one other - y. A
// product with +-1 is exact. Chunks of smaller transforms add -0, which changes nothing.
template <uint32_t kSlots>
__device__ void stage_between_lanes(const RowPlace<kSlots>& at, uint32_t step,
                                    float (&y)[kSlots][kChunk]) {
  const float sign = (at.lane & step) != 0 ? -1.0f : 1.0f;
  if (at.whole) {
    if (at.size[0] <= step * kChunk) return;
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i)
        y[s][i] =
            __fmaf_rn(y[s][i], sign, __shfl_xor_sync(kAllLanes, y[s][i], static_cast<int>(step)));
    }
    return;
  }
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const bool part = at.size[s] > step * kChunk;
    const float slot_sign = part ? sign : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, y[s][i], static_cast<int>(step));
      y[s][i] = __fmaf_rn(y[s][i], slot_sign, part ? other : -0.0f);
    }
  }
}

template <uint32_t kSlots>
__device__ void stages_between_slots(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) {
#pragma unroll
  for (uint32_t step = 1; step < kSlots; step *= 2) {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      if ((s & step) != 0 || at.size[s] <= step * at.lanes * kChunk) continue;
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i) butterfly(y[s][i], y[s | step][i]);
    }
  }
}

// Stages 4 and those between lanes.
template <uint32_t kSlots>
__device__ void transform_lanes(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) stage_inside<4>(y[s]);
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    if (step < at.lanes) stage_between_lanes(at, step, y);
  }
}

// Without its factor. kAscending: stages 1, 2, 4, ... as the mlx-native formats have them;
// otherwise 4, 8, ... n / 2, 1, 2.
template <bool kAscending, uint32_t kSlots>
__device__ void transform(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) {
  if constexpr (kAscending) {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) stage_inside<1>(y[s]), stage_inside<2>(y[s]);
  }
  transform_lanes(at, y);
  stages_between_slots(at, y);
  if constexpr (!kAscending) {
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) stage_inside<1>(y[s]), stage_inside<2>(y[s]);
  }
}

template <uint32_t kSlots>
__device__ void scale_transformed(const RowPlace<kSlots>& at, float (&y)[kSlots][kChunk]) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(at.size[s])));
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) y[s][i] *= factor;
  }
}

}  // namespace gyre::cuda
