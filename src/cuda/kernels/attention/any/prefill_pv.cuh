#pragma once
// Prefill attention: the weighted sum of a stage's V. V is the A operand, 16 coordinates to a tile,
// weights fill B. A warp owns every warps-th tile of coordinates for all keys: nothing is added up
// between warps.
#include "cuda/kernels/attention/any/prefill_softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

constexpr uint32_t kMaxTiles = 4;  // of coordinates, for a warp: 256 / 16 / 4 warps

// Index of the scale block that a coordinate belongs to.
inline uint32_t scale_block_of(uint32_t head_dim, uint32_t coordinate) {
  uint32_t block = 0, begin = 0;
#pragma unroll 1
  for (uint32_t size = abi::kKvMaxHeadDim; size != 0; size /= 2) {
    if ((head_dim & size) == 0) continue;
    const uint32_t block_dim = size < abi::kKvScaleBlock ? size : abi::kKvScaleBlock;
    if (coordinate < begin + size) return block + (coordinate - begin) / block_dim;
    block += size / block_dim;
    begin += size;
  }
  return block;
}

template <uint32_t kV>
inline void sum_levels(const PrefillProblem& problem, uint32_t block, const unsigned char* stage,
                       uint32_t column, float (&c)[2][4]) {
  constexpr LevelTable kTable = level_table<kV, true>();
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const uint32_t n = problem.params.v.head_dim;
  const unsigned char* const weights = problem.shared() + problem.layout.weights +
                                       block * problem.layout.weights_plane +
                                       g * problem.layout.weights_pitch + j * 16;
#pragma unroll 1
  for (uint32_t h = 0; h < problem.layout.stage_keys / 32; ++h) {
    const uint8_t* const tile =
        stage + problem.layout.v_codes + (h * 4 + j) * problem.layout.v_pitch;
    const ValuePair<kV> pair(tile, n, column + g, column + g + 8);
    Operands<1> x[2];
    unpack_values<kV, true>(kTable, pair.low, pair.high, 0, x);
    uint32_t a[4], b[4];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      to_f16x2(raised_levels<kV>(x[i].term[0][0]), a[i], a[2 + i]);
      to_f16x2(raised_levels<kV>(x[i].term[0][1]), b[i], b[2 + i]);
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= problem.layout.rows / 8) break;
      const uint4 w =
          *reinterpret_cast<const uint4*>(weights + 8 * t * problem.layout.weights_pitch + h * 64);
      mma_f16(c[t], a, w.x, w.y);
      mma_f16(c[t], b, w.z, w.w);
    }
  }
}

// Returns whether a value was infinite or NaN, if `checks`.
template <uint32_t kV>
inline bool sum_float16(const PrefillProblem& problem, const unsigned char* stage, uint32_t column,
                        bool checks, float (&c)[2][4]) {
  constexpr uint32_t kExponent = kV == kFormatF16 ? 0x7C00u : 0x7F80u;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const unsigned char* const values = stage + problem.layout.v_codes + column * 2;
  bool non_finite = false;
  for (uint32_t s = 0; s < problem.layout.stage_keys / 16; ++s) {
    uint32_t a[4];
    ldmatrix_transposed(a, values + (s * 16 + lane % 8 + lane / 16 * 8) * problem.layout.v_pitch +
                               lane / 8 % 2 * 16);
    if (checks) {
      non_finite = non_finite || not_finite(a[0], kExponent) || not_finite(a[1], kExponent) ||
                   not_finite(a[2], kExponent) || not_finite(a[3], kExponent);
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= problem.layout.rows / 8) break;
      const unsigned char* const w = problem.shared() + problem.layout.weights +
                                     (8 * t + g) * problem.layout.weights_pitch + s * 32 + j * 4;
      if constexpr (kV == kFormatBf16) {
        const unsigned char* const lo = w + problem.layout.weights_plane;
        Float16Type<kV>::mma(c[t], a, *reinterpret_cast<const uint32_t*>(lo),
                             *reinterpret_cast<const uint32_t*>(lo + 16));
      }
      Float16Type<kV>::mma(c[t], a, *reinterpret_cast<const uint32_t*>(w),
                           *reinterpret_cast<const uint32_t*>(w + 16));
    }
  }
  return non_finite;
}

// Key by key, without the keys of weight 0: the slots of others are not read, or must not matter.
template <uint32_t kV>
inline void sum_one_by_one(const PrefillProblem& problem, uint32_t index, uint32_t column,
                           float (&c)[2][4]) {
  const abi::AttentionParams& p = problem.params;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4, n = p.v.head_dim;
  const float unit = mlx_native_unit(p.v);
  for (uint32_t key = 0; key < problem.layout.stage_keys; ++key) {
    const uint64_t at = uint64_t{index} * problem.layout.stage_keys + key;
    if (!problem.holds_key(at)) continue;
    const uint8_t* const row = problem.v_codes + problem.row_offset(at, p.v.codes_tile_stride);
    const auto* const norms = reinterpret_cast<const float*>(
        problem.v_scales + problem.row_offset(at, p.v.scales_tile_stride));
    float x[2] = {0.0f, 0.0f};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t at_column = column + g + 8 * i;
      if (at_column >= n) continue;
      if constexpr (kV <= kFormatBf16) {
        x[i] = load_as_float(reinterpret_cast<uint64_t>(row), kV, at_column);
      } else {
        const uint32_t code = mlx_native_stored_code(kV, row, at_column);
        x[i] = mlx_native_centroid<kV>(code) * (norms[n == 512 ? at_column / 256 : 0] / unit);
      }
    }
    const float up = kV == kFormatF16 ? power_of_two(kWeightExponent) : 1.0f;
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= problem.layout.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float w =
            problem.logits()[(8 * t + 2 * j + i % 2) * problem.layout.logits_pitch + key] * up;
        if (w != 0) c[t][i] += w * x[i / 2];
      }
    }
  }
}

// acc[tile][8 rows][C fragment]: the stage's sum is added as a whole.
template <uint32_t kV>
inline void add_values(const PrefillProblem& problem, uint32_t index,
                       float (&acc)[kMaxTiles][2][4]) {
  const uint32_t warp = threadIdx.x / kWarp, j = threadIdx.x % 4, n = problem.params.v.head_dim;
  const unsigned char* const stage = problem.stage(index);
  const Rows& rows = problem.state();
#pragma unroll
  for (uint32_t tile = 0; tile < kMaxTiles; ++tile) {
    const uint32_t column = (tile * problem.layout.warps + warp) * 16;
    if (column >= n) break;
    float c[2][4] = {};
    uint32_t block = 0;
    if constexpr (abi::kv_is_native(kV)) {
      block = problem.layout.v_blocks == 1 ? 0 : scale_block_of(n, column);
      sum_levels<kV>(problem, block, stage, column, c);
    } else if constexpr (is_float16_format(kV)) {
      const bool checks = rows.hidden != 0,
                 non_finite = sum_float16<kV>(problem, stage, column, checks, c);
      if (checks && __any_sync(kAll, non_finite) != 0) {
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) c[i / 4][i % 4] = 0;
        sum_one_by_one<kV>(problem, index, column, c);
      }
    } else {
      sum_one_by_one<kV>(problem, index, column, c);
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= problem.layout.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = 8 * t + 2 * j + i % 2;
        const float2 f = problem.factors()[block * problem.layout.rows + row];
        acc[tile][t][i] = acc[tile][t][i] * rows.rescale[row] + c[t][i] * f.x * f.y;
      }
    }
  }
}

}  // namespace gyre::cuda
