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

// A warp's sums of rows 2 j and 2 j + 1 to shared memory, times what `of` says for them.
template <class Shape>
inline void put_sums(const float (&acc)[Shape::kN / 16][4], float2 of, float* rows) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kN);
  const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t e = 0; e < 2; ++e) {
    const float factor = e == 0 ? of.x : of.y;
    float* const to = rows + (2 * j + e) * kPitch;
#pragma unroll
    for (uint32_t i = 0; i < Shape::kN / 16; ++i) {
      to[i * 16 + g] = acc[i][e] * factor;
      to[i * 16 + g + 8] = acc[i][e + 2] * factor;
    }
  }
}
// Of row j, from integers.
template <class Shape>
inline void put_sums(const int32_t (&acc)[Shape::kN / 16][4], float factor, float* rows) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kN);
  const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
  const auto whole = [&](const int32_t* two) {
    return fmaf(static_cast<float>(two[0]), 256.0f, static_cast<float>(two[1])) * 0x1p-31f * factor;
  };
#pragma unroll
  for (uint32_t i = 0; i < Shape::kN / 32; ++i) {
    const int32_t(&x)[4] = acc[2 * i], (&y)[4] = acc[2 * i + 1];
    *reinterpret_cast<float4*>(rows + j * kPitch + i * 32 + 4 * g) =
        make_float4(whole(x), whole(x + 2), whole(y), whole(y + 2));
  }
}

// {max, sum} of row r of the block, of which the warps have left theirs in of_warp, and what this
// warp's sums of it, relative to 2^from, must be multiplied with. Of the lanes that share a row,
// `among` of each other, each looks at kEach warps.
template <uint32_t kEach>
inline float join_states(DecodeStates& states, uint32_t busy, uint32_t r, uint32_t among,
                         float from) {
  float max = minus_infinity(), total = 0;
  float2 of[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t w = among * kEach + i;
    of[i] = w < busy ? states.of_warp[w][r] : make_float2(minus_infinity(), 0.0f);
    max = fmaxf(max, of[i].x);
  }
  constexpr int kFirst = kEach == 2 ? 4 : 1, kLast = kEach == 2 ? 32 : 4;
#pragma unroll
  for (int by = kFirst; by < kLast; by *= 2) max = fmaxf(max, __shfl_xor_sync(kAll, max, by));
  const float base = max == minus_infinity() ? 0.0f : max;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) total += of[i].y * exp2_fast(of[i].x - base);
#pragma unroll
  for (int by = kFirst; by < kLast; by *= 2) total += __shfl_xor_sync(kAll, total, by);
  if (threadIdx.x / kWarp == 0 && among == 0) states.of_row[r] = make_float2(max, total);
  return exp2_fast(from - base);
}

// A warp's sums into shared memory, on one scale with those of the others; of_row.
template <class Shape, uint32_t kRows>
inline void put_warp(DecodeStates& states, float* sums, uint32_t busy,
                     const DecodeRow (&row)[eights(kRows)],
                     const float (&acc)[eights(kRows)][Shape::kN / 16][4]) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kN);
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t h = 0; h < eights(kRows); ++h) {
    const DecodeRow& r = row[h];
    float sum = r.sum + __shfl_xor_sync(kAll, r.sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float keep = r.max == minus_infinity() ? 1.0f : exp2_fast(r.from - r.max);
    if (j == 0) states.of_warp[warp][g + 8 * h] = make_float2(r.max, sum * keep);
  }
  __syncthreads();
  if (warp >= busy) return;
#pragma unroll
  for (uint32_t h = 0; h < eights(kRows); ++h) {
    float factor = join_states<4>(states, busy, g + 8 * h, j, row[h].from);
    if constexpr (Shape::kV == kPlanF16) factor *= power_of_two(-kWeightUp);
    put_sums<Shape>(acc[h], turn_rows(factor), sums + 8 * h * kPitch);
  }
}

template <class Shape, uint32_t kRows>
inline void put_warp(DecodeStates& states, float* sums, uint32_t busy,
                     const LevelRow (&row)[kRows / 4],
                     const int32_t (&acc)[kRows / 4][Shape::kN / 16][4]) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kN);
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t four = 0; four < kRows / 4; ++four) {
    const LevelRow& r = row[four];
    const float max = column_max(r.max);
    float sum = r.sum;
#pragma unroll
    for (int by = 4; by < 32; by *= 2) sum += __shfl_xor_sync(kAll, sum, by);
    const float keep = max == minus_infinity() ? 1.0f : exp2_fast(r.from - max);
    if (g == 0) states.of_warp[warp][j + 4 * four] = make_float2(max, sum * keep);
  }
  __syncthreads();
  if (warp >= busy) return;
#pragma unroll
  for (uint32_t four = 0; four < kRows / 4; ++four) {
    const float factor = join_states<2>(states, busy, j + 4 * four, g, row[four].from);
    put_sums<Shape>(acc[four], factor * (1.0f / row[four].per), sums + 4 * four * kPitch);
  }
}

// The sum of the warps that had keys, two neighbouring coordinates of a row at a time, to where
// `put` wants it. A warp's sums lie `pitch` floats after another's.
template <class Shape, class Put>
inline void add_warps(const DecodeUnit& u, const float* sums, uint32_t pitch, uint32_t busy,
                      const Put& put) {
  constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kN), kN = Shape::kN;
  __syncthreads();
  for (uint32_t i = threadIdx.x * 2; i < u.rows * kN; i += blockDim.x * 2) {
    const float* const from = sums + i / kN * kPitch + i % kN;
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (uint32_t w = 0; w < busy; ++w) {
      const float2 x = *reinterpret_cast<const float2*>(from + w * pitch);
      total.x += x.x, total.y += x.y;
    }
    put(i / kN, i % kN, total);
  }
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
  __syncthreads();
  for (uint32_t r = threadIdx.x / kWarp; r < u.rows; r += blockDim.x / kWarp) {
    float x[kN / kWarp];
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) x[i] = wide[r * kN + lane + i * kWarp];
    store_row<Shape>(p, u, args, r, {states.of_row[r].x, states.of_row[r].y}, x);
  }
}

// Whether this block is the last of its unit to have left its rows.
inline bool is_last(const DecodeUnit& u, uint32_t* counters, DecodeStates& states) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const counter = counters + u.kv_head * abi::kAttentionGroups + blockIdx.y;
    const uint32_t before = add_ordered(counter);  // the barrier has ordered the block's stores
    states.last = before + 1 == u.splits ? 1 : 0;
    if (states.last != 0) *counter = 0;  // for the next replay
  }
  __syncthreads();
  return states.last != 0;
}

// What all splits left of the unit's rows, two coordinates to a thread at a time: to `wide` and
// of_row, as if it were one block's.
template <class Shape>
inline void join_splits(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t partial,
                        DecodeStates& states, float* wide) {
  constexpr uint32_t kN = Shape::kN, kAtOnce = kN == 256 ? 8 : 16;
  const uint64_t stride = p.tokens * p.heads * (kN + 2);
  for (uint32_t i = threadIdx.x * 2; i < u.rows * kN; i += blockDim.x * 2) {
    const RowPlace at = row_place(u, i / kN);
    const float* from = partial_row(p, partial, 0, at.token, at.head, kN);
    RowState all = {minus_infinity(), 0};
    float2 x = make_float2(0.0f, 0.0f);
    for (uint32_t first = 0; first < u.splits; first += kAtOnce) {
      float2 values[kAtOnce], state[kAtOnce];
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        state[s] = make_float2(minus_infinity(), 0.0f);
        values[s] = make_float2(0.0f, 0.0f);
        if (first + s < u.splits) {
          state[s] = load_fresh(reinterpret_cast<const float2*>(from + kN));
          values[s] = load_fresh(reinterpret_cast<const float2*>(from + i % kN));
        }
        from += stride;
      }
      float max = all.max;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) max = fmaxf(max, state[s].x);
      const float base = max == minus_infinity() ? 0.0f : max, keep = exp2_fast(all.max - base);
      all.max = max, all.sum *= keep;
      x.x *= keep, x.y *= keep;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const float weight = exp2_fast(state[s].x - base);
        all.sum += state[s].y * weight;
        if (weight != 0) x.x += values[s].x * weight, x.y += values[s].y * weight;
      }
    }
    *reinterpret_cast<float2*>(wide + i) = x;
    if (i % kN == 0) states.of_row[i / kN] = make_float2(all.max, all.sum);
  }
}

// What all blocks of a cluster pushed here: [block][row of this block's][coordinate, max, sum]. A
// warp to a row.
template <class Shape>
inline void store_pushed_rows(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                              const DecodeStates& states, const float* pushed) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp, kBlocks = abi::kAttentionCluster;
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const uint32_t stride = (u.rows + kBlocks - 1) / kBlocks * (kN + 2);
  for (uint32_t mine = threadIdx.x / kWarp; cluster_rank() + mine * kBlocks < u.rows;
       mine += warps) {
    wait_for_pushes(&states.pushes);
    const float* const row = pushed + mine * (kN + 2);
    float max = minus_infinity(), x[kEach] = {};
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) max = fmaxf(max, row[b * stride + kN]);
    const float base = max == minus_infinity() ? 0.0f : max;
    RowState all = {max, 0};
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const float weight = exp2_fast(row[b * stride + kN] - base);
      all.sum += row[b * stride + kN + 1] * weight;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
        if (weight != 0) x[i] += row[b * stride + lane + i * kWarp] * weight;
    }
    store_row<Shape>(p, u, args, cluster_rank() + mine * kBlocks, all, x);
  }
}

// What is pushed to this block, in bytes.
inline uint32_t pushed_bytes(const DecodeUnit& u, uint32_t n) {
  constexpr uint32_t kBlocks = abi::kAttentionCluster;
  const uint32_t rows = (u.rows + kBlocks - 1 - cluster_rank()) / kBlocks;
  return rows * kBlocks * (n + 2) * 4;
}

// From what the warps left in shared memory to the output, or to what is left of it.
template <class Shape, uint32_t kRows, uint32_t kCluster>
inline void finish(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                   DecodeStates& states, const float* sums, uint32_t pitch, uint32_t busy,
                   float* wide) {
  constexpr uint32_t kN = Shape::kN;
  if constexpr (kCluster > 1) {
    const uint32_t each = (u.rows + kCluster - 1) / kCluster;  // rows of a block
    cluster_wait();
    add_warps<Shape>(u, sums, pitch, busy, [&](uint32_t r, uint32_t coordinate, float2 x) {
      float* const to = wide + (cluster_rank() * each + r / kCluster) * (kN + 2);
      push(x, to + coordinate, &states.pushes, r % kCluster);
      if (coordinate == 0) push(states.of_row[r], to + kN, &states.pushes, r % kCluster);
    });
    store_pushed_rows<Shape>(p, u, args, states, wide);
  } else if (p.partial == abi::kAttentionMerged && u.splits > 1) {
    const uint64_t partial = args.at[arg_partial] + abi::attention_counters(p.kv_heads) * 4;
    add_warps<Shape>(u, sums, pitch, busy, [&](uint32_t r, uint32_t coordinate, float2 x) {
      const RowPlace at = row_place(u, r);
      float* const to = partial_row(p, partial, blockIdx.x, at.token, at.head, kN);
      *reinterpret_cast<float2*>(to + coordinate) = x;
      if (coordinate == 0) *reinterpret_cast<float2*>(to + kN) = states.of_row[r];
    });
    if (!is_last(u, pointer<uint32_t>(args.at[arg_partial]), states)) return;
    join_splits<Shape>(p, u, partial, states, wide);
    store_rows<Shape>(p, u, args, states, wide);
  } else {
    add_warps<Shape>(u, sums, pitch, busy, [&](uint32_t r, uint32_t coordinate, float2 x) {
      *reinterpret_cast<float2*>(wide + r * kN + coordinate) = x;
    });
    store_rows<Shape>(p, u, args, states, wide);
  }
}

}  // namespace gyre::cuda
