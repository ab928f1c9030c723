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

// A warp's sums lie in shared memory as floats, [row][coordinate of its own].
template <class Shape>
struct WarpSums {
  static constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kOwn);
  static constexpr float kUnit = Shape::kLevelsV ? 0x1p-31f : 1.0f;  // of theirs

  // Of row j, whose weights have this sum: what levels have too much is taken off while numbers are
  // exact, or small.
  static void put(const int32_t (&acc)[Shape::kOwn / 16][4], uint32_t weights, float* rows) {
    using Form = typename Shape::FormV;
    const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const uint32_t upper = weights / 256 * Form::kBias;
    const auto lower = static_cast<float>(weights % 256 * Form::kBias);
    const auto whole = [&](const int32_t* two) {
      const uint32_t rest = static_cast<uint32_t>(two[0]) * Form::kStep - upper;
      return fmaf(static_cast<float>(static_cast<int32_t>(rest)), 256.0f,
                  fmaf(static_cast<float>(two[1]), Form::kStep, -lower));
    };
#pragma unroll
    for (uint32_t i = 0; i < Shape::kOwn / 32; ++i) {
      const int32_t(&x)[4] = acc[2 * i], (&y)[4] = acc[2 * i + 1];
      *reinterpret_cast<float4*>(rows + j * kPitch + i * 32 + 4 * g) =
          make_float4(whole(x), whole(x + 2), whole(y), whole(y + 2));
    }
  }
  // Of rows 2 j and 2 j + 1.
  static void put(const float (&acc)[Shape::kOwn / 16][4], float* rows) {
    const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < Shape::kOwn / 16 * 4; ++i) {
      const uint32_t e = i % 4;
      rows[(2 * j + e % 2) * kPitch + i / 4 * 16 + g + e / 2 * 8] = acc[i / 4][e];
    }
  }
};

// What a warp has, to shared memory.
template <class Shape, uint32_t kRows>
inline void put_warp(DecodeStates& states, float* sums, const DecodeRow (&row)[eights(kRows)],
                     const float (&acc)[eights(kRows)][Shape::kOwn / 16][4]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t h = 0; h < eights(kRows); ++h) {
    const DecodeRow& r = row[h];
    float sum = r.sum + __shfl_xor_sync(kAll, r.sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float per = Shape::kV == kPlanF16 ? power_of_two(kWeightUp) : 1.0f;
    if (j == 0) states.of_warp[warp][g + 8 * h] = {r.max, sum, r.from, per};
    WarpSums<Shape>::put(acc[h], sums + 8 * h * WarpSums<Shape>::kPitch);
  }
}

template <class Shape, uint32_t kRows>
inline void put_warp(DecodeStates& states, float* sums, const LevelRow (&row)[kRows / 4],
                     const int32_t (&acc)[kRows / 4][Shape::kOwn / 16][4]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t four = 0; four < kRows / 4; ++four) {
    const LevelRow& r = row[four];
    const float max = column_max(r.max);
    float sum = r.sum;
    uint32_t weights = r.weights;
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
      sum += __shfl_xor_sync(kAll, sum, by);
      weights += __shfl_xor_sync(kAll, weights, by);
    }
    if (g == 0) states.of_warp[warp][j + 4 * four] = {max, sum, r.from, r.per};
    WarpSums<Shape>::put(acc[four], weights, sums + 4 * four * WarpSums<Shape>::kPitch);
  }
}

// What each warp's sums of a row must be multiplied with to be on one scale; of_row. A lane to a
// warp and row; all threads of the block are here. Warps that share keys have the same
// probabilities: the first one's count.
template <uint32_t kRows, uint32_t kParts>
inline void join_warps(DecodeStates& states, uint32_t busy) {
  constexpr uint32_t kLanes = kDecodeMostWarps;
  __syncthreads();
  const uint32_t w = threadIdx.x % kLanes;
  for (uint32_t r = threadIdx.x / kLanes; r < kRows; r += blockDim.x / kLanes) {
    WarpRow mine = {minus_infinity(), 0, kLowest, 1};
    if (w < busy) mine = states.of_warp[w][r];
    float max = mine.max;
#pragma unroll
    for (int by = 1; by < static_cast<int>(kLanes); by *= 2)
      max = fmaxf(max, __shfl_xor_sync(kAll, max, by));
    const float factor = exp2_fast(mine.from - (max == minus_infinity() ? 0.0f : max));
    if (w < busy) states.to_block[w][r] = factor * (1.0f / mine.per);
    float sum = w % kParts == 0 ? mine.sum * factor : 0.0f;
#pragma unroll
    for (int by = 1; by < static_cast<int>(kLanes); by *= 2) sum += __shfl_xor_sync(kAll, sum, by);
    if (w == 0) states.of_row[r] = make_float2(max, sum);
  }
  __syncthreads();
}

// Neighbouring coordinates that a thread has at a time: more where there are many.
template <class Shape, uint32_t kRows>
struct Together {
  static constexpr uint32_t kCount = Shape::kN >= 128 && kRows * Shape::kN >= 1024 ? 4 : 2;
  using Vector = typename Choose<kCount == 4, float4, float2>::type;
};

// The sum of the warps that had keys, two neighbouring coordinates of a row at a time, to where
// `put` wants it. A warp's sums lie `pitch` floats after another's.
template <class Shape, uint32_t kRows, class Put>
inline void add_warps(const DecodeUnit& u, DecodeStates& states, const float* sums, uint32_t pitch,
                      uint32_t busy, const Put& put) {
  using Sums = WarpSums<Shape>;
  using Vector = typename Together<Shape, kRows>::Vector;
  constexpr uint32_t kN = Shape::kN, kEach = Together<Shape, kRows>::kCount;
  join_warps<kRows, Shape::kParts>(states, busy);
  for (uint32_t i = threadIdx.x * kEach; i < u.rows * kN; i += blockDim.x * kEach) {
    const uint32_t r = i / kN, part = i % kN / Shape::kOwn;
    const float* const from = sums + r * Sums::kPitch + i % Shape::kOwn;
    float total[kEach] = {};
#pragma unroll 8
    for (uint32_t w = part; w < busy; w += Shape::kParts) {
      const Vector x = *reinterpret_cast<const Vector*>(from + w * pitch);
      const float factor = states.to_block[w][r];
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e)
        total[e] = fmaf(reinterpret_cast<const float*>(&x)[e] * Sums::kUnit, factor, total[e]);
    }
#pragma unroll
    for (uint32_t e = 0; e < kEach; e += 2) put(r, i % kN + e, make_float2(total[e], total[e + 1]));
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

// Rows of the unit that a block writes: the blocks of a cluster take turns.
template <uint32_t kCluster>
struct OwnRows {
  uint32_t first, count;
  explicit OwnRows(const DecodeUnit& u)
      : first(kCluster == 1 ? 0 : cluster_rank()),
        count((u.rows + kCluster - 1 - first) / kCluster) {}
  uint32_t row(uint32_t i) const { return first + i * kCluster; }
};

// They lie in `wide`, [row][coordinate].
template <class Shape, uint32_t kCluster>
inline void store_rows(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                       const DecodeStates& states, const float* wide) {
  constexpr uint32_t kN = Shape::kN;
  const OwnRows<kCluster> own(u);
  const uint32_t lane = threadIdx.x % kWarp;
  __syncthreads();
  for (uint32_t r = threadIdx.x / kWarp; r < own.count; r += blockDim.x / kWarp) {
    float x[kN / kWarp];
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) x[i] = wide[r * kN + lane + i * kWarp];
    store_row<Shape>(p, u, args, own.row(r), {states.of_row[r].x, states.of_row[r].y}, x);
  }
}

// Clusters of a unit that have keys.
template <uint32_t kCluster>
inline uint32_t clusters_of(const DecodeUnit& u) {
  return (u.splits + kCluster - 1) / kCluster;
}

// Whether this block is the last of those with the same rows to have left them.
template <uint32_t kCluster>
inline bool is_last(const DecodeUnit& u, uint32_t* counters, DecodeStates& states) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const counter =
        counters + (u.kv_head * abi::kAttentionGroups + blockIdx.y) * abi::kAttentionPair +
        OwnRows<kCluster>(u).first;
    const uint32_t before = add_ordered(counter);  // the barrier has ordered the block's stores
    states.last = before + 1 == clusters_of<kCluster>(u) ? 1 : 0;
    if (states.last != 0) *counter = 0;  // for the next replay
  }
  __syncthreads();
  return states.last != 0;
}

// What the clusters of a merged call leave in global memory: values [cluster][row][coordinate],
// then {max, sum} [cluster][row]. Rows are all of the call's.
template <uint32_t kN>
struct SplitRows {
  float* values;
  float2* states;
  uint32_t rows;

  SplitRows(const abi::AttentionParams& p, uint64_t partial)
      : values(pointer<float>(partial + abi::attention_counters(p.kv_heads) * 4)),
        rows(static_cast<uint32_t>(p.tokens * p.heads)) {
    states = reinterpret_cast<float2*>(values + uint64_t{gridDim.x} * rows * kN);
  }
  static uint32_t row(const abi::AttentionParams& p, RowPlace at) {
    return at.token * static_cast<uint32_t>(p.heads) + at.head;
  }
  uint64_t at(uint32_t cluster, uint32_t row) const { return uint64_t{cluster} * rows + row; }
};

// What all clusters left of the block's rows: to `wide` and of_row, as if it were one block's. A
// warp has coordinates of one row, each lane some of all clusters, and the states of one.
template <class Shape, uint32_t kRows, uint32_t kCluster>
inline void join_splits(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t partial,
                        DecodeStates& states, float* wide) {
  using Vector = typename Together<Shape, kRows>::Vector;
  constexpr uint32_t kN = Shape::kN, kEach = Together<Shape, kRows>::kCount;
  constexpr uint32_t kAtOnce = 16 / kCluster;
  const SplitRows<kN> from(p, partial);
  const OwnRows<kCluster> own(u);
  const uint32_t lane = threadIdx.x % kWarp, clusters = clusters_of<kCluster>(u);
  for (uint32_t i = threadIdx.x * kEach; i < own.count * kN; i += blockDim.x * kEach) {
    const uint32_t row = SplitRows<kN>::row(p, row_place(u, own.row(i / kN)));
    RowState all = {minus_infinity(), 0};
    float x[kEach] = {};
    for (uint32_t first = 0; first < clusters; first += kAtOnce) {
      float2 state = make_float2(minus_infinity(), 0.0f);
      if (lane < kAtOnce && first + lane < clusters)
        state = load_fresh(from.states + from.at(first + lane, row));
      Vector values[kAtOnce];
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const uint32_t cluster = first + s < clusters ? first + s : first;  // that weighs nothing
        values[s] = load_fresh(
            reinterpret_cast<const Vector*>(from.values + from.at(cluster, row) * kN + i % kN));
      }
      const float max = fmaxf(all.max, warp_max(state.x));
      const float base = max == minus_infinity() ? 0.0f : max, keep = exp2_fast(all.max - base);
      const float weight = exp2_fast(state.x - base);
      all = {max, all.sum * keep + warp_sum(state.y * weight)};
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e) x[e] *= keep;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const float of = __shfl_sync(kAll, weight, static_cast<int>(s));
        const auto* const value = reinterpret_cast<const float*>(values + s);
#pragma unroll
        for (uint32_t e = 0; e < kEach; ++e)
          if (of != 0) x[e] = fmaf(value[e], of, x[e]);
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) wide[i + e] = x[e];
    if (i % kN == 0) states.of_row[i / kN] = make_float2(all.max, all.sum);
  }
}

// What all blocks of a cluster pushed here, [block][own row][coordinate, max, sum], to where `put`
// wants it. A warp to a row.
template <class Shape, uint32_t kCluster, class Put>
inline void add_pushed_rows(const DecodeUnit& u, const DecodeStates& states, const float* pushed,
                            const Put& put) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp;
  const OwnRows<kCluster> own(u);
  const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const uint32_t stride = (u.rows + kCluster - 1) / kCluster * (kN + 2);
  for (uint32_t mine = threadIdx.x / kWarp; mine < own.count; mine += warps) {
    wait_for_pushes(&states.pushes);
    const float* const row = pushed + mine * (kN + 2);
    float max = minus_infinity(), x[kEach] = {};
#pragma unroll
    for (uint32_t b = 0; b < kCluster; ++b) max = fmaxf(max, row[b * stride + kN]);
    const float base = max == minus_infinity() ? 0.0f : max;
    RowState all = {max, 0};
#pragma unroll
    for (uint32_t b = 0; b < kCluster; ++b) {
      const float weight = exp2_fast(row[b * stride + kN] - base);
      all.sum += row[b * stride + kN + 1] * weight;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
        if (weight != 0) x[i] += row[b * stride + lane + i * kWarp] * weight;
    }
    put(own.row(mine), all, x);
  }
}

// What is pushed to this block, in bytes.
template <uint32_t kCluster>
inline uint32_t pushed_bytes(const DecodeUnit& u, uint32_t n) {
  return OwnRows<kCluster>(u).count * kCluster * (n + 2) * 4;
}

// From what the warps left in shared memory to the output, or to what is left of it.
template <class Shape, uint32_t kRows, uint32_t kCluster>
inline void finish(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                   DecodeStates& states, const float* sums, uint32_t pitch, uint32_t busy,
                   float* wide) {
  constexpr uint32_t kN = Shape::kN;
  const bool merges = p.partial == abi::kAttentionMerged && clusters_of<kCluster>(u) > 1;
  const SplitRows<kN> to(p, args.at[arg_partial]);
  const auto place = [&](uint32_t r) {
    return to.at(blockIdx.x / kCluster, SplitRows<kN>::row(p, row_place(u, r)));
  };
  if constexpr (kCluster > 1) {
    const uint32_t each = (u.rows + kCluster - 1) / kCluster;  // rows of a block
    cluster_wait();
    add_warps<Shape, kRows>(
        u, states, sums, pitch, busy, [&](uint32_t r, uint32_t coordinate, float2 x) {
          float* const own = wide + (cluster_rank() * each + r / kCluster) * (kN + 2);
          push(x, own + coordinate, &states.pushes, r % kCluster);
          if (coordinate == 0) push(states.of_row[r], own + kN, &states.pushes, r % kCluster);
        });
    add_pushed_rows<Shape, kCluster>(u, states, wide,
                                     [&](uint32_t r, const RowState& all, float(&x)[kN / kWarp]) {
                                       if (!merges) {
                                         store_row<Shape>(p, u, args, r, all, x);
                                         return;
                                       }
                                       const uint64_t at = place(r);
                                       const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
                                       for (uint32_t i = 0; i < kN / kWarp; ++i)
                                         to.values[at * kN + lane + i * kWarp] = x[i];
                                       if (lane == 0) to.states[at] = make_float2(all.max, all.sum);
                                     });
  } else {
    add_warps<Shape, kRows>(u, states, sums, pitch, busy,
                            [&](uint32_t r, uint32_t coordinate, float2 x) {
                              const uint64_t at = merges ? place(r) : 0;
                              float* const row = merges ? to.values + at * kN : wide + r * kN;
                              *reinterpret_cast<float2*>(row + coordinate) = x;
                              if (merges && coordinate == 0) to.states[at] = states.of_row[r];
                            });
    if (!merges) store_rows<Shape, 1>(p, u, args, states, wide);
  }
  if (!merges || !is_last<kCluster>(u, pointer<uint32_t>(args.at[arg_partial]), states)) return;
  join_splits<Shape, kRows, kCluster>(p, u, args.at[arg_partial], states, wide);
  store_rows<Shape, kCluster>(p, u, args, states, wide);
}

}  // namespace gyre::cuda
