#pragma once
// Decode attention: from the sums of warps to those of a block, from splits to rows of the output.
#include "attention_decode_unit.cuh"

namespace gyre::cuda {

// {values, max, sum} of a row of one split, in global memory.
inline float* partial_row(const abi::AttentionParams& p, uint64_t partial, uint32_t split,
                          uint32_t token, uint32_t head, uint32_t n) {
  return pointer<float>(partial) +
         ((uint64_t{split} * p.tokens + token) * p.heads + head) * (n + 2);
}

// A warp's sums to rows in shared memory, times what `of` says for rows 2 j and 2 j + 1.
template <class Shape>
inline void put_sums(const float (&acc)[Shape::kN / 16][4], float2 of, float* rows) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kN);
  const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t e = 0; e < 2; ++e) {
    const float factor = e == 0 ? of.x : of.y;
    float* const to = rows + (2 * j + e) * kPitch;
    if constexpr (Shape::kLevelsV) {
#pragma unroll
      for (uint32_t i = 0; i < Shape::kN / 32; ++i) {
        const float(&x)[4] = acc[2 * i], (&y)[4] = acc[2 * i + 1];
        *reinterpret_cast<float4*>(to + i * 32 + 4 * g) =
            make_float4(x[e] * factor, x[e + 2] * factor, y[e] * factor, y[e + 2] * factor);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < Shape::kN / 16; ++i) {
        to[i * 16 + g] = acc[i][e] * factor;
        to[i * 16 + g + 8] = acc[i][e + 2] * factor;
      }
    }
  }
}

// Sums of the warps that had keys, on one scale: [row][coordinate] in `wide`, {max, sum} in of_row.
template <class Shape, uint32_t kRows>
inline void join_warps(const DecodeUnit& u, DecodeStates& states, float* wide, float* sums,
                       uint32_t busy, const DecodeRow (&row)[kRows / 8],
                       const float (&acc)[kRows / 8][Shape::kN / 16][4]) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kN), kN = Shape::kN;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t h = 0; h < kRows / 8; ++h) {
    float sum = row[h].sum + __shfl_xor_sync(kAll, row[h].sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float keep = row[h].max == minus_infinity() ? 1.0f : exp2_fast(row[h].from - row[h].max);
    if (j == 0) states.of_warp[warp][g + 8 * h] = make_float2(row[h].max, sum * keep);
  }
  __syncthreads();  // the keys are no longer needed, either
  if (warp < busy) {
#pragma unroll
    for (uint32_t h = 0; h < kRows / 8; ++h) {
      float2 of[kDecodeMostWarps];
      float max = minus_infinity(), total = 0;
#pragma unroll
      for (uint32_t w = 0; w < kDecodeMostWarps; ++w) {
        of[w] = w < busy ? states.of_warp[w][g + 8 * h] : make_float2(minus_infinity(), 0.0f);
        max = fmaxf(max, of[w].x);
      }
      const float from = max == minus_infinity() ? 0.0f : max;
      if (warp == 0) {
#pragma unroll
        for (uint32_t w = 0; w < kDecodeMostWarps; ++w)
          total += of[w].y * exp2_fast(of[w].x - from);
        if (j == 0) states.of_row[g + 8 * h] = make_float2(max, total);
      }
      float factor = exp2_fast(row[h].from - from);
      if constexpr (Shape::kV == kPlanF16) factor *= power_of_two(-kWeightUp);
      put_sums<Shape>(acc[h], turn_rows(factor), sums + (warp * kRows + 8 * h) * kPitch);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < u.rows * kN; i += blockDim.x) {
    const float* const from = sums + i / kN * kPitch + i % kN;
    float total = 0;
#pragma unroll 8
    for (uint32_t w = 0; w < busy; ++w) {
      total += from[w * kRows * kPitch];
      if (Shape::kLevelsV && u.paired) total += from[(w * kRows + 4) * kPitch];
    }
    wide[i] = total;
  }
  __syncthreads();
}

// Out of the domain of the cache, and to where it is wanted: one row, by a warp; lane i has
// coordinates i + 32 c.
template <class Shape>
inline void store_row(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                      uint32_t r, RowState state, float (&x)[Shape::kN / kWarp]) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  if constexpr (Shape::kLevelsV) {
    hadamard_lanes<kN>(x);
    flip_lanes<kN>(x, inverse_root(kN));
  }
  const RowPlace at = row_place(u, r);
  if (p.partial == abi::kAttentionPartial) {
    float* const to = partial_row(p, args.at[arg_partial], blockIdx.x, at.token, at.head, kN);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) to[lane + i * kWarp] = x[i];
    if (lane == 0) to[kN] = state.max * kLn2, to[kN + 1] = state.sum;
    return;
  }
  const float factor = finish_row(state, pointer<const float>(args.at[arg_sinks]), at.head);
  const uint64_t out =
      args.at[arg_out] + at.token * p.out_token_stride + at.head * p.out_head_stride;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
    store_float(out, p.out_dtype, lane + i * kWarp, x[i] * factor);
  if (lane == 0 && args.at[arg_lse] != 0) {
    *pointer<float>(args.at[arg_lse] + at.token * p.lse_token_stride +
                    at.head * p.lse_head_stride) = log_sum_exp(state);
  }
}

template <class Shape>
inline void store_rows(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                       const DecodeStates& states, const float* wide) {
  constexpr uint32_t kN = Shape::kN;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < u.rows; r += blockDim.x / kWarp) {
    float x[kN / kWarp];
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) x[i] = wide[r * kN + lane + i * kWarp];
    store_row<Shape>(p, u, args, r, {states.of_row[r].x, states.of_row[r].y}, x);
  }
}

// What all splits left of the unit's rows, a warp to a row.
template <class Shape>
inline void store_joined_rows(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                              uint64_t partial) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp,
                     kAtOnce = kN == 128 ? 16 : (kN == 512 ? 4 : 8);
  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t stride = p.tokens * p.heads * (kN + 2);
  for (uint32_t r = threadIdx.x / kWarp; r < u.rows; r += blockDim.x / kWarp) {
    const RowPlace at = row_place(u, r);
    const float* const row = partial_row(p, partial, 0, at.token, at.head, kN);
    RowState all = {minus_infinity(), 0};
    float x[kEach] = {};
    for (uint32_t first = 0; first < u.splits; first += kAtOnce) {
      float values[kAtOnce][kEach];
      float2 state[kAtOnce];
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const float* const from = row + (first + s) * stride;
        state[s] = make_float2(minus_infinity(), 0.0f);
        if (first + s < u.splits) {
          state[s] = load_fresh(reinterpret_cast<const float2*>(from + kN));
#pragma unroll
          for (uint32_t i = 0; i < kEach; ++i) values[s][i] = load_fresh(from + lane + i * kWarp);
        }
      }
      float max = all.max;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) max = fmaxf(max, state[s].x);
      const float from = max == minus_infinity() ? 0.0f : max, keep = exp2_fast(all.max - from);
      all.max = max, all.sum *= keep;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) x[i] *= keep;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const float weight = exp2_fast(state[s].x - from);
        all.sum += state[s].y * weight;
        if (weight == 0) continue;  // and whatever an absent one holds
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) x[i] += values[s][i] * weight;
      }
    }
    store_row<Shape>(p, u, args, r, all, x);
  }
}

// Leaves the block's rows for whoever comes last, and says whether that is this block.
template <class Shape>
inline bool hand_over(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t partial,
                      uint32_t* counters, DecodeStates& states, const float* wide) {
  constexpr uint32_t kN = Shape::kN;
  for (uint32_t i = threadIdx.x; i < u.rows * kN; i += blockDim.x) {
    const RowPlace at = row_place(u, i / kN);
    float* const to = partial_row(p, partial, blockIdx.x, at.token, at.head, kN);
    to[i % kN] = wide[i];
    if (i % kN == 0) *reinterpret_cast<float2*>(to + kN) = states.of_row[i / kN];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for all of the block, whose stores the barrier has ordered before
    uint32_t* const counter = counters + u.kv_head;
    const uint32_t before = atomicAdd(counter, 1u);
    states.last = before + 1 == u.splits ? 1 : 0;
    if (states.last != 0) *counter = 0;  // for the next replay
    __threadfence();
  }
  __syncthreads();
  return states.last != 0;
}

}  // namespace gyre::cuda
