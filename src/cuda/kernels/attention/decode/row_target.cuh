#pragma once
// Decode attention: where a row's result goes, and the row as warps hold it while partial states
// are merged.
#include "cuda/kernels/attention/common/query_values.cuh"
#include "cuda/kernels/attention/common/rotate_row.cuh"
#include "cuda/kernels/attention/common/softmax.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/sums.cuh"

namespace gyre::cuda {

template <class Traits>
inline RowTarget row_target(const abi::AttentionParams& p, const DecodeProblem& problem,
                            const Args& args, uint32_t r) {
  constexpr uint32_t kDim = Traits::kRowDim;
  const RowPlace at = row_place(problem, r);
  const uint64_t rows = p.tokens * p.heads, row = at.token * p.heads + at.head;
  const uint64_t partial = args.at[arg_partial];
  RowTarget target = {};
  if (p.partial == abi::kAttentionPartial) {
    target.out = partial + (blockIdx.x * rows + row) * (Traits::kValueDim + 2) * 4;
    return target;
  }
  if (p.partial == abi::kAttentionMerged) {
    const uint32_t clusters = gridDim.x / Traits::kCluster;
    const uint64_t values = partial + kDecodeCounters * 4;
    target.values = values + row * clusters * kDim * 4;
    target.states = values + (rows * kDim + row * 2) * clusters * 4;
    target.counter = partial + row * 4;
  }
  target.out = args.at[arg_out] + at.token * p.out_token_stride + at.head * p.out_head_stride;
  target.out_dtype = p.out_dtype;
  if (args.at[arg_lse] != 0)
    target.lse = args.at[arg_lse] + at.token * p.lse_token_stride + at.head * p.lse_head_stride;
  if (args.at[arg_sink_logits] != 0) target.sink = args.at[arg_sink_logits] + at.head * 4;
  return target;
}

// Over pages.
template <class Traits>
inline RowTarget item_row_target(const abi::AttentionParams& p, const abi::AttentionRun& run,
                                 const Args& args, uint32_t r) {
  const uint32_t row = run.first_row + r, token_of = row / p.group;
  const uint64_t token = uint64_t{run.first_token} + token_of;
  const uint64_t head = uint64_t{run.kv_head} * p.group + (row - token_of * p.group);
  RowTarget target = {};
  if (p.partial == abi::kAttentionStates) {
    target.out = args.at[arg_out] + (token * p.heads + head) * (Traits::kValueDim + 2) * 4;
    return target;
  }
  target.out = args.at[arg_out] + token * p.out_token_stride + head * p.out_head_stride;
  target.out_dtype = p.out_dtype;
  if (args.at[arg_lse] != 0)
    target.lse = args.at[arg_lse] + token * p.lse_token_stride + head * p.lse_head_stride;
  if (args.at[arg_sink_logits] != 0) target.sink = args.at[arg_sink_logits] + head * 4;
  return target;
}

// A row of up to 128 coordinates, or the 128 of a longer one that one warp takes: lane i has
// coordinates i + 32 c. In buffers that only this kernel reads, a lane's coordinates are adjacent.
template <uint32_t kDim>
struct RowChunk {
  static constexpr uint32_t kSize = kDim < 128 ? kDim : 128, kChunks = kDim / kSize;
  static constexpr uint32_t kPerLane = kSize / kWarp;
  using Vector = typename Choose<kPerLane == 4, float4, float2>::type;
  union {
    float x[kPerLane];
    Vector all;
  };

  static uint32_t offset(uint32_t chunk) { return chunk * kSize + threadIdx.x % kWarp * kPerLane; }
  void clear() {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) x[i] = 0;
  }
  void scale(float factor) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) x[i] *= factor;
  }
  template <uint32_t kCount>
  void add(const RowChunk (&chunks)[kCount], const float (&weights)[kCount]) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
      for (uint32_t e = 0; e < kPerLane; ++e) x[e] = fma_weighted(chunks[i].x[e], weights[i], x[e]);
    }
  }
};

// A warp's sums as floats in shared memory, [row][coordinate of its slice]; over levels in the
// order in which RowChunk holds them.
template <class Traits>
struct WarpSums {
  using Chunk = RowChunk<Traits::kRowDim>;
  static constexpr uint32_t kPitch = decode_sums_pitch(Traits::kV, Traits::kRowSlice);
  static constexpr float kUnit = 0x1p-31f;  // of levels' sums: the fixed-point scale has room above

  // What the biased levels add, times the row's sum of weights, is subtracted while numbers are
  // exact, or small. `factor` brings the sums of several scale blocks to one fixed-point scale.
  struct Levels {
    uint32_t upper;
    float lower, factor;

    void set(uint32_t weight_sum, float by) {
      upper = weight_sum / 256 * Traits::FormV::kBias;
      lower = static_cast<float>(weight_sum % 256 * Traits::FormV::kBias) * kUnit;
      factor = by;
    }
    float whole(const int32_t* two) const {
      using Form = typename Traits::FormV;
      const uint32_t below = static_cast<uint32_t>(two[0]) * Form::kStep - upper;
      const float x = fmaf(static_cast<float>(static_cast<int32_t>(below)), 256 * kUnit,
                           fmaf(static_cast<float>(two[1]), Form::kStep * kUnit, -lower));
      return Traits::kWarpBlocksV == 1 ? x : x * factor;
    }
  };

  // Coordinates of row j, four at a time. Coordinates behind the last one are 0.
  static void write(const LevelSums<Traits>& from, uint32_t four,
                    const Levels (&of_block)[Traits::kWarpBlocksV], float* rows) {
    const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < Traits::kRowSlice / Chunk::kSize * 4; ++i) {
      const uint32_t chunk = i / 4, e = i % 4;
      Chunk x;  // coordinates 4 g + e of every 32
#pragma unroll
      for (uint32_t c = 0; c < Chunk::kPerLane; ++c) {
        const uint32_t span = chunk * Chunk::kPerLane + c, at = 2 * span + e / 2;
        x.x[c] = 0;
        if (span < from.kSpans)
          x.x[c] = of_block[from.block_of(at)].whole(from.sums[four][at] + e % 2 * 2);
      }
      *reinterpret_cast<typename Chunk::Vector*>(rows + j * kPitch + chunk * Chunk::kSize +
                                                 (4 * g + e) * Chunk::kPerLane) = x.all;
    }
  }
  // Coordinates of rows 2 j and 2 j + 1.
  static void write(const float (&sums)[Traits::kValueSlice / 16][4], float* rows) {
    const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < Traits::kValueSlice / 16 * 4; ++i) {
      const uint32_t e = i % 4;
      rows[(2 * j + e % 2) * kPitch + i / 4 * 16 + g + e / 2 * 8] = sums[i / 4][e];
    }
  }

  static Chunk read(const float* from) {
    const uint32_t lane = threadIdx.x % kWarp;
    Chunk x;
    if constexpr (Traits::kLevelsV) {
      x.all = reinterpret_cast<const typename Chunk::Vector*>(from)[lane];
    } else {
#pragma unroll
      for (uint32_t c = 0; c < Chunk::kPerLane; ++c) x.x[c] = from[lane + c * kWarp];
    }
    return x;
  }
};

// The scale blocks of a row of levels from kBlock on, out of the rotated domain.
template <class Traits, uint32_t kBlock = 0, uint32_t kWhole>
inline void store_blocks(uint64_t out, uint32_t dtype, float factor, const float (&whole)[kWhole]) {
  constexpr ScaleBlock kOf = scale_block(Traits::kValueDim, kBlock);
  constexpr uint32_t kPerLane = (kOf.size + kWarp - 1) / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  float x[kPerLane];
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) x[i] = whole[kOf.begin / kWarp + i];
  hadamard_lanes<kOf.size>(lane, x);
  flip_lanes<kOf.begin>(lane, factor * inverse_root(kOf.size), x);
  if (kOf.size >= kWarp || lane < kOf.size)
    store_floats<kPerLane, kWarp>(out, dtype, kOf.begin + lane, x);
  if constexpr (kBlock + 1 < Traits::kBlocksV)
    store_blocks<Traits, kBlock + 1>(out, dtype, factor, whole);
}

// A part of a finished row of a round dim.
template <class Traits, uint32_t kWhole>
inline void store_part(uint64_t out, uint32_t dtype, float factor, uint32_t part, uint32_t lane,
                       const float (&whole)[kWhole]) {
  constexpr uint32_t kDim = Traits::kValueDim, kParts = Traits::kRowParts;
  constexpr uint32_t kPerLane = kDim / kWarp / kParts;
  float x[kPerLane];
  if constexpr (Traits::kLevelsV) {
    hadamard_block<kParts>(whole, part, lane, x);
    factor *= inverse_root(kDim);
    if (part == 0) {
      flip_lanes<0>(lane, factor, x);
    } else {
      flip_lanes<kDim / kParts>(lane, factor, x);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i)
      x[i] = factor * (kParts == 1 || part == 0 ? whole[i] : whole[kDim / kWarp - kPerLane + i]);
  }
  store_floats<kPerLane, kWarp>(out, dtype, part * (kDim / kParts) + lane, x);
}

// A row of 16-bit values of another dim.
template <class Traits, uint32_t kWhole>
inline void store_columns(uint64_t out, uint32_t dtype, float factor, uint32_t lane,
                          const float (&whole)[kWhole]) {
  constexpr uint32_t kPerLane = Traits::kValueDim / kWarp, kLeft = Traits::kValueDim % kWarp;
  float x[kPerLane], left[1] = {};
#pragma unroll
  for (uint32_t i = 0; i < kPerLane; ++i) x[i] = factor * whole[i];
  store_floats<kPerLane, kWarp>(out, dtype, lane, x);
  if constexpr (kLeft != 0) {
    left[0] = factor * whole[kPerLane];
    if (lane < kLeft) store_floats<1, kWarp>(out, dtype, kPerLane * kWarp + lane, left);
  }
}

// One part of a finished row, by a warp, out of the rotated domain and to its target; lane i has
// coordinates i + 32 c of the whole row.
template <class Traits>
inline void store_row(const RowTarget& target, bool partial, uint32_t part, SoftmaxState state,
                      const float (&whole)[Traits::kRowDim / kWarp]) {
  constexpr uint32_t kDim = Traits::kValueDim;
  const uint32_t lane = code_motion_barrier(threadIdx.x % kWarp);
  const uint32_t dtype = partial ? 0 : target.out_dtype;
  float factor = 1;
  if (!partial) factor = finish_row(state, sink_logit(target.sink, 0));
  if constexpr (is_round_dim(kDim)) {
    store_part<Traits>(target.out, dtype, factor, part, lane, whole);
  } else if constexpr (Traits::kLevelsV) {
    store_blocks<Traits>(target.out, dtype, factor, whole);
  } else {
    store_columns<Traits>(target.out, dtype, factor, lane, whole);
  }
  if (part != 0 || lane != 0) return;
  if (partial) {
    float* const to = pointer<float>(target.out);
    to[kDim] = state.max * kLn2, to[kDim + 1] = state.sum;
  } else if (target.lse != 0) {
    *pointer<float>(target.lse) = log_sum_exp(state);
  }
}

}  // namespace gyre::cuda
