#pragma once
// A row by one warp, for writes of few tokens: lane l has quads l, l + 32, ... of four coordinates.
// Such a write is latency and cold code, so loops between lanes are not unrolled. Bits are those of
// encode.cuh.
#include "cuda/kernels/encode.cuh"

namespace gyre::cuda {

constexpr uint32_t kQuad = 4;  // coordinates
constexpr uint32_t kQuadRow = 32 * kQuad;

template <uint32_t kQuads>
struct QuadLanes {
  uint32_t head_dim;
  uint32_t lane;
  uint32_t size[kQuads];  // points of the transform that a quad is part of; 0: behind the row

  __device__ explicit QuadLanes(uint32_t dim) : head_dim(dim), lane(threadIdx.x % 32) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q)  // as RowPlace has it
      size[q] = begin(q) < dim ? 0x80000000u >> __clz(static_cast<int>(begin(q) ^ dim)) : 0;
  }
  __device__ uint32_t begin(uint32_t q) const { return q * kQuadRow + lane * kQuad; }
  __device__ bool active(uint32_t q) const { return size[q] != 0; }
};

template <class Source, uint32_t kQuads>
struct RawQuads {
  Pack<Source, kQuad> of[kQuads];

  __device__ RawQuads(const QuadLanes<kQuads>& at, const Source* row) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      of[q] = {};
      if (at.active(q)) of[q] = load_pack<Source, kQuad>(row + at.begin(q));
    }
  }
  template <class Target>
  __device__ void copy_to(const QuadLanes<kQuads>& at, Target* row) const {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      Pack<Target, kQuad> out;
#pragma unroll
      for (uint32_t i = 0; i < kQuad; ++i) out.of[i] = Convert<Target, Source>::value(of[q].of[i]);
      if (at.active(q)) store_pack(out, row + at.begin(q));
    }
  }
};

// Bits i: whether coordinate first + i is negated.
constexpr uint32_t sign_word(uint32_t first) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 32; ++i) bits |= (abi::kv_sign_bit(first + i) != 0 ? 1u : 0u) << i;
  return bits;
}

template <uint32_t kQ>
__device__ uint32_t quad_signs(uint32_t lane) {
  constexpr uint32_t kFirst = kQ * kQuadRow;
  constexpr uint32_t a = sign_word(kFirst), b = sign_word(kFirst + 32), c = sign_word(kFirst + 64),
                     d = sign_word(kFirst + 96);
  const uint32_t word = lane < 16 ? (lane < 8 ? a : b) : (lane < 24 ? c : d);
  return word >> (lane % 8 * kQuad);
}

// Coordinates with their signs, and as the next quads.
template <uint32_t kQ, class Source, uint32_t kQuads>
__device__ void widen_quads(const QuadLanes<kQuads>& at, const RawQuads<Source, kQuads>& raw,
                            float (&y)[kQuads][kQuad]) {
  const uint32_t signs = quad_signs<kQ>(at.lane);
#pragma unroll
  for (uint32_t i = 0; i < kQuad; ++i)
    y[kQ][i] = __uint_as_float(__float_as_uint(widen(raw.of[kQ].of[i])) ^
                               (signs << (31 - i) & 0x80000000u));
  if constexpr (kQ + 1 < kQuads) widen_quads<kQ + 1>(at, raw, y);
}

// Stages 4, 8, ... n / 2, then 1, 2. Where a transform is shorter -0 is added, which changes
// nothing.
template <uint32_t kQuads>
__device__ void transform_quads(const QuadLanes<kQuads>& at, float (&y)[kQuads][kQuad]) {
#pragma unroll 1
  for (uint32_t step = 1; step < 32; step *= 2) {
    const float sign = (at.lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      const bool part = at.size[q] > step * kQuad;
#pragma unroll
      for (uint32_t i = 0; i < kQuad; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, y[q][i], static_cast<int>(step));
        y[q][i] = __fmaf_rn(y[q][i], part ? sign : 1.0f, part ? other : -0.0f);
      }
    }
  }
#pragma unroll
  for (uint32_t step = 1; step < kQuads; step *= 2) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      if ((q & step) != 0 || at.size[q] <= step * kQuadRow) continue;
#pragma unroll
      for (uint32_t i = 0; i < kQuad; ++i) butterfly(y[q][i], y[q | step][i]);
    }
  }
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    butterfly(y[q][0], y[q][1]), butterfly(y[q][2], y[q][3]);
    butterfly(y[q][0], y[q][2]), butterfly(y[q][1], y[q][3]);
  }
}

// v + the value `step` lanes away, where step is not 0.
__device__ inline float add_lane(float v, uint32_t step) {
  const float other = __shfl_sync(kAllLanes, v, static_cast<int>((threadIdx.x ^ step) & 31));
  return step != 0 ? v + other : v;
}

// The four groups of a quarter of 256 coordinates, in order.
__device__ inline float add_groups(float v) {
  const uint32_t first = threadIdx.x & 31 & ~12u;
  float sum = __shfl_sync(kAllLanes, v, static_cast<int>(first));
#pragma unroll 1
  for (uint32_t lane = first + 4; lane < first + 16; lane += 4)
    sum = sum + __shfl_sync(kAllLanes, v, static_cast<int>(lane));
  return sum;
}

// Step 5 of docs/kv_formats.md, for each scale block.
template <uint32_t kQuads>
__device__ void sum_squares(const QuadLanes<kQuads>& at, const float (&y)[kQuads][kQuad],
                            float (&sum)[kQuads]) {
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q)
    sum[q] = (y[q][0] * y[q][0] + y[q][2] * y[q][2]) + (y[q][1] * y[q][1] + y[q][3] * y[q][3]);
#pragma unroll
  for (uint32_t q = 0; q + 1 < kQuads; q += 2) {    // quarters 0 + 2 and 1 + 3
    if (at.size[q] < abi::kKvScaleBlock) continue;  // warp-uniform
    const float first = add_groups(sum[q]);
    sum[q] = sum[q + 1] = first + add_groups(sum[q + 1]);
  }
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    const uint32_t size = at.size[q];
    const bool large = size >= abi::kKvScaleBlock, medium = size >= 64 && !large;
    sum[q] = add_lane(sum[q], size == 128 ? 4 : 0);
    sum[q] = add_lane(sum[q], medium ? size / 8 : 0);
    sum[q] = add_lane(sum[q], large ? 16 : (medium ? size / 16 : (size == 32 ? 4 : 0)));
    sum[q] = add_lane(sum[q], size >= 16 ? 2 : 0);
    sum[q] = add_lane(sum[q], 1);
  }
}

// Over blocks of at most `limit` coordinates, in any order.
template <uint32_t kQuads, class Combine>
__device__ void reduce_quads(const QuadLanes<kQuads>& at, uint32_t limit, uint32_t (&v)[kQuads],
                             const Combine& combine) {
#pragma unroll 1
  for (uint32_t step = 1; step < 32; step *= 2) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, v[q], static_cast<int>(step));
      if (at.size[q] > step * kQuad) v[q] = combine(v[q], other);
    }
  }
#pragma unroll
  for (uint32_t step = 1; step < kQuads; step *= 2) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      if ((q & step) != 0 || least_of(at.size[q], limit) <= step * kQuadRow) continue;
      v[q] = v[q | step] = combine(v[q], v[q | step]);
    }
  }
}

template <uint32_t kQuads>
__device__ void find_largest(const float (&y)[kQuads][kQuad], uint32_t (&largest)[kQuads]) {
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    largest[q] = 0;
#pragma unroll
    for (uint32_t i = 0; i < kQuad; ++i)
      largest[q] = larger_of(largest[q], __float_as_uint(y[q][i]) & 0x7FFFFFFFu);
  }
}

// 1 / size, a power of two.
__device__ inline float inverse_size(uint32_t size) {
  return __uint_as_float(0x7F000000u - __float_as_uint(static_cast<float>(size)));
}

// Codes, a byte for each coordinate, and scales of the blocks that the quads are part of.
template <uint32_t kQuads>
struct EncodedQuads {
  uint32_t codes[kQuads];
  float scale[kQuads];  // times 2^31
};

// Steps 7 and 8. y is transformed.
template <uint32_t kFormat, uint32_t kQuads>
__device__ void code_quads(const QuadLanes<kQuads>& at, const float (&y)[kQuads][kQuad],
                           const float (&sum)[kQuads], float stretch, EncodedQuads<kQuads>& out) {
  constexpr bool kMagnitudes = abi::kv_has_magnitudes(kFormat);
  uint32_t squares[kQuads], largest[kQuads];
  if constexpr (!kMagnitudes) {
    find_largest(y, largest);
    reduce_quads(at, abi::kKvScaleBlock, largest, larger_of);
  }
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    const uint32_t size = least_of(at.size[q], abi::kKvScaleBlock);
    const float root =
        kMagnitudes ? __fsqrt_rn(sum[q] * inverse_size(size)) : __uint_as_float(largest[q]);
    squares[q] =
        code_quad<kFormat>(y[q], __fdiv_rn(abi::kv_codec(kFormat).gain, root), out.codes[q]);
    if (sum[q] == 0) out.codes[q] = kZeroCodes<kFormat>;
  }
  reduce_quads(at, abi::kKvScaleBlock, squares, [](uint32_t a, uint32_t b) { return a + b; });
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    const float energy = sum[q] * inverse_size(at.size[q]);
    const float levels = sum[q] == 0 ? 1.0f : static_cast<float>(static_cast<int>(squares[q]));
    out.scale[q] = __fsqrt_rn(__fdiv_rn(energy, levels)) * stretch * 0x1p31f;
  }
}

// Step 6: whether a transform block's squares left the range. One of 512 has two scales.
template <uint32_t kQuads>
__device__ bool is_extreme(const QuadLanes<kQuads>& at, const float (&sum)[kQuads]) {
  bool extreme = false;
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    float all = sum[q];
    if constexpr (kQuads == 4) {
      if (at.size[q] > abi::kKvScaleBlock) all = sum[0] + sum[2];
    }
    extreme = extreme || (at.active(q) && !in_range(all));
  }
  return extreme;
}

// A row out of range is brought into it and goes round once more.
template <uint32_t kFormat, class Source, uint32_t kQuads>
__device__ void encode_quads(const QuadLanes<kQuads>& at, const RawQuads<Source, kQuads>& raw,
                             float stretch, uint32_t (&codes)[kQuads], uint32_t (&scale)[kQuads]) {
  uint32_t largest[kQuads] = {};
  bool again = false;
#pragma unroll 1
  for (;;) {
    float y[kQuads][kQuad], sum[kQuads];
    widen_quads<0>(at, raw, y);
    if (again) {
#pragma unroll
      for (uint32_t q = 0; q < kQuads; ++q) lose_exponent(lost_exponent(largest[q]), y[q]);
    }
    transform_quads(at, y);
    sum_squares(at, y, sum);
    EncodedQuads<kQuads> out;
    code_quads<kFormat>(at, y, sum, stretch, out);
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      codes[q] = out.codes[q];
      scale[q] = scale_bits(out.scale[q]);
      if (!again) continue;
      scale[q] = scale_bits(out.scale[q] * power_of_two(lost_exponent(largest[q])));
      if (largest[q] != 0 && largest[q] < 0x7F800000u) continue;
      codes[q] = kZeroCodes<kFormat>;
      scale[q] = largest[q] == 0 ? 0u : uint32_t{abi::kKvScaleNaN};
    }
    if (again || __any_sync(kAllLanes, is_extreme(at, sum) ? 1 : 0) == 0) return;
    again = true;
    widen_quads<0>(at, raw, y);
    find_largest(y, largest);
    reduce_quads(at, abi::kKvMaxHeadDim, largest, larger_of);
  }
}

}  // namespace gyre::cuda
