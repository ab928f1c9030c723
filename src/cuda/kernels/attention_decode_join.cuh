#pragma once
// Decode attention: from the sums of warps to those of a block, from splits to rows of the output.
#include "attention_decode_unit.cuh"

namespace gyre::cuda {

// Of a row of the unit. A partial call leaves {values, max, sum} [split][row]. What the clusters of
// a merged one leave is values [row][cluster], then {max, sum} [row][cluster]. Rows are all of the
// call's.
template <uint32_t kN>
inline RowEnd row_end(const abi::AttentionParams& p, const DecodeUnit& u, const Args& args,
                      uint32_t r, uint32_t all_clusters) {
  const RowPlace at = row_place(u, r);
  const uint64_t rows = p.tokens * p.heads, row = at.token * p.heads + at.head;
  const uint64_t partial = args.at[arg_partial];
  RowEnd end = {};
  if (p.partial == abi::kAttentionPartial) {
    end.out = partial + (blockIdx.x * rows + row) * (kN + 2) * 4;
    return end;
  }
  if (p.partial == abi::kAttentionMerged) {
    const uint64_t values = partial + abi::attention_counters(p.kv_heads) * 4;
    end.values = values + row * all_clusters * kN * 4;
    end.states = values + (rows * kN + row * 2) * all_clusters * 4;
    end.counter = partial + (u.kv_head * abi::kAttentionRows + u.first_row + r) * 4;
  }
  end.out = args.at[arg_out] + at.token * p.out_token_stride + at.head * p.out_head_stride;
  end.out_dtype = p.out_dtype;
  if (args.at[arg_lse] != 0)
    end.lse = args.at[arg_lse] + at.token * p.lse_token_stride + at.head * p.lse_head_stride;
  if (args.at[arg_sinks] != 0) end.sink = args.at[arg_sinks] + at.head * 4;
  return end;
}

// A row, or the 128 coordinates of a longer one that a warp takes: lane i has i + 32 c. In memory
// that only the blocks of a call know, a lane's lie together.
template <uint32_t kN>
struct RowPart {
  static constexpr uint32_t kSize = kN < 128 ? kN : 128, kParts = kN / kSize;
  static constexpr uint32_t kEach = kSize / kWarp;
  using Vector = typename Choose<kEach == 4, float4, float2>::type;
  union {
    float x[kEach];
    Vector all;
  };

  static uint32_t place(uint32_t part) { return part * kSize + threadIdx.x % kWarp * kEach; }
};

// Each times its weight.
template <uint32_t kN, uint32_t kCount>
inline void add_parts(const RowPart<kN> (&x)[kCount], const float (&weights)[kCount],
                      RowPart<kN>& sum) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
    for (uint32_t e = 0; e < sum.kEach; ++e)
      sum.x[e] = add_weighted(x[i].x[e], weights[i], sum.x[e]);
  }
}

// A warp's sums lie in shared memory as floats, [row][coordinate of its own]; those of levels in
// the order in which RowPart has them.
template <class Shape>
struct WarpSums {
  using Part = RowPart<Shape::kN>;
  static constexpr uint32_t kPitch = decode_sums_pitch(Shape::kV, Shape::kOwn);
  static constexpr float kUnit = 0x1p-31f;  // of levels' sums: what `per` makes of them has room

  // Of row j, whose weights have this sum: what levels have too much is taken off while numbers are
  // exact, or small.
  static void put(const int32_t (&acc)[Shape::kOwn / 16][4], uint32_t weights, float* rows) {
    using Form = typename Shape::FormV;
    const uint32_t g = threadIdx.x % kWarp / 4, j = threadIdx.x % 4;
    const uint32_t upper = weights / 256 * Form::kBias;
    const float lower = static_cast<float>(weights % 256 * Form::kBias) * kUnit;
    const auto whole = [&](const int32_t* two) {
      const uint32_t rest = static_cast<uint32_t>(two[0]) * Form::kStep - upper;
      return fmaf(static_cast<float>(static_cast<int32_t>(rest)), 256 * kUnit,
                  fmaf(static_cast<float>(two[1]), Form::kStep * kUnit, -lower));
    };
#pragma unroll
    for (uint32_t i = 0; i < Shape::kOwn / Part::kSize * 4; ++i) {
      const uint32_t part = i / 4, e = i % 4;
      Part x;  // coordinates 4 g + e of every 32
#pragma unroll
      for (uint32_t c = 0; c < Part::kEach; ++c)
        x.x[c] = whole(acc[2 * (part * Part::kEach + c) + e / 2] + e % 2 * 2);
      *reinterpret_cast<typename Part::Vector*>(rows + j * kPitch + part * Part::kSize +
                                                (4 * g + e) * Part::kEach) = x.all;
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

  // Of a part of a row that begins there.
  static Part get(const float* from) {
    const uint32_t lane = threadIdx.x % kWarp;
    Part x;
    if constexpr (Shape::kLevelsV) {
      x.all = reinterpret_cast<const typename Part::Vector*>(from)[lane];
    } else {
#pragma unroll
      for (uint32_t c = 0; c < Part::kEach; ++c) x.x[c] = from[lane + c * kWarp];
    }
    return x;
  }
};

// 1 / x of a power of two, quickly, of 0 or of NaN.
inline float inverse_unit(float x) {
  constexpr uint32_t kTwice = 0x7F000000u;  // an exponent and that of the inverse add up to this
  return x >= 0x1p-126f ? __uint_as_float(kTwice - __float_as_uint(x)) : 1.0f / x;
}

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
      if constexpr (Shape::FormV::kBias != 0) weights += __shfl_xor_sync(kAll, weights, by);
    }
    if (g == 0) states.of_warp[warp][j + 4 * four] = {max, sum, r.from, r.per};
    WarpSums<Shape>::put(acc[four], weights, sums + 4 * four * WarpSums<Shape>::kPitch);
  }
}

// The sum of the warps that had keys: a part of a row, by a warp, after all of the block have put
// theirs. Lane w finds what warp w's must be multiplied with. Warps that share keys have the same
// probabilities: the first one's count. A warp's sums lie `pitch` floats after another's. All are
// asked for at once, those of a warp without keys as another one's that weighs nothing.
template <class Shape>
inline RowState add_warps(const DecodeStates& states, const float* sums, uint32_t pitch,
                          uint32_t busy, uint32_t r, uint32_t part, RowPart<Shape::kN>& row) {
  using Sums = WarpSums<Shape>;
  constexpr uint32_t kLanes = 16;  // every so many lanes the same
  static_assert(kDecodeMostWarps <= kLanes);
  const uint32_t lane = threadIdx.x % kLanes, first = part * row.kSize;
  WarpRow mine = {minus_infinity(), 0, minus_infinity(), 1};
  if (lane < busy) mine = states.of_warp[lane][r];
  const float* const from =
      sums + first / Shape::kOwn * pitch + r * Sums::kPitch + first % Shape::kOwn;
  constexpr uint32_t kCount = Shape::kMostWarps / Shape::kParts;
  RowPart<Shape::kN> x[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t w = i * Shape::kParts;
    x[i] = Sums::get(from + (w < busy ? w : 0) * pitch);
  }
  const float max = warp_max<kLanes>(mine.max);
  const float factor = exp2_fast(mine.from - (max == minus_infinity() ? 0.0f : max));
  const float scale = factor * inverse_unit(mine.per);
#pragma unroll
  for (uint32_t i = 0; i < row.kEach; ++i) row.x[i] = 0;
  float of[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i)
    of[i] = __shfl_sync(kAll, scale, static_cast<int>(i * Shape::kParts + first / Shape::kOwn));
  add_parts(x, of, row);
  return {max, warp_sum<kLanes>(lane % Shape::kParts == 0 ? mine.sum * factor : 0.0f)};
}

// Out of the domain of the cache, and to where it is wanted: a block of a row, by a warp; lane i
// has coordinates i + 32 c of the whole row.
template <class Shape>
inline void store_row(const RowEnd& end, bool partial, uint32_t block, RowState state,
                      const float (&whole)[Shape::kN / kWarp]) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp / Shape::kBlocks;
  const uint32_t lane = late(threadIdx.x % kWarp), first = block * (kN / Shape::kBlocks) + lane;
  float factor = 1;
  if (!partial) factor = finish_row(state, pointer<const float>(end.sink), 0);
  float x[kEach];
  if constexpr (Shape::kLevelsV) {
    hadamard_block<Shape::kBlocks>(whole, block, lane, x);
    factor *= inverse_root(kN);
    if (block == 0) {
      flip_lanes<0>(lane, factor, x);
    } else {
      flip_lanes<kN / Shape::kBlocks>(lane, factor, x);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      x[i] =
          factor * (Shape::kBlocks == 1 || block == 0 ? whole[i] : whole[kN / kWarp - kEach + i]);
  }
  store_floats<kEach, kWarp>(end.out, partial ? 0 : end.out_dtype, first, x);
  if (first != 0) return;
  if (partial) {
    float* const to = pointer<float>(end.out);
    to[kN] = state.max * kLn2, to[kN + 1] = state.sum;
  } else if (end.lse != 0) {
    *pointer<float>(end.lse) = log_sum_exp(state);
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

// Clusters of a unit that have keys.
template <uint32_t kCluster>
inline uint32_t clusters_of(const DecodeUnit& u) {
  return (u.splits + kCluster - 1) / kCluster;
}

// What all clusters left of a part of a row, by a warp; lanes have the states of one each, every
// kAtOnce lanes the same.
template <uint32_t kN, uint32_t kAtOnce>
inline RowState join_part(const RowEnd& end, uint32_t part, uint32_t clusters, RowPart<kN>& sum) {
  using Vector = typename RowPart<kN>::Vector;
  constexpr uint32_t kStride = kN / RowPart<kN>::kEach;  // from one cluster's to the next
  const uint32_t lane = threadIdx.x % kAtOnce;
  const Vector* from =
      reinterpret_cast<const Vector*>(pointer<const float>(end.values) + sum.place(part));
  const auto* const states = pointer<const float2>(end.states);
  RowState all = {minus_infinity(), 0};
#pragma unroll
  for (uint32_t i = 0; i < sum.kEach; ++i) sum.x[i] = 0;
  for (uint32_t first = 0; first < clusters; first += kAtOnce) {
    RowPart<kN> x[kAtOnce] = {};
#pragma unroll
    for (uint32_t c = 0; c < kAtOnce; ++c)
      if (first + c < clusters) x[c].all = load_fresh(from + c * kStride);
    from += kAtOnce * kStride;
    float2 state = make_float2(minus_infinity(), 0.0f);
    if (first + lane < clusters) state = load_fresh(states + first + lane);
    const float max = fmaxf(all.max, warp_max<kAtOnce>(state.x));
    const float base = max == minus_infinity() ? 0.0f : max, keep = exp2_fast(all.max - base);
    const float weight = exp2_fast(state.x - base);
    all = {max, all.sum * keep + warp_sum<kAtOnce>(state.y * weight)};
    float of[kAtOnce];
#pragma unroll
    for (uint32_t c = 0; c < kAtOnce; ++c) of[c] = __shfl_sync(kAll, weight, static_cast<int>(c));
#pragma unroll
    for (uint32_t i = 0; i < sum.kEach; ++i) sum.x[i] *= keep;
    add_parts(x, of, sum);
  }
  return all;
}

// A part of a row goes to the block of the cluster that writes the row: [block][own row]
// [coordinates, max, sum].
template <uint32_t kN, uint32_t kCluster>
inline void push_part(const DecodeUnit& u, DecodeStates& states, uint32_t r, uint32_t part,
                      const RowState& state, const RowPart<kN>& row, float* wide) {
  const uint32_t each = (u.rows + kCluster - 1) / kCluster;  // rows of a block
  float* const to = wide + (cluster_rank() * each + r / kCluster) * (kN + 2);
#pragma unroll
  for (uint32_t i = 0; i < row.kEach; i += 2)
    push(make_float2(row.x[i], row.x[i + 1]), to + row.place(part) + i, &states.pushes,
         r % kCluster);
  if (threadIdx.x % kWarp == 0 && part == 0)
    push(make_float2(state.max, state.sum), to + kN, &states.pushes, r % kCluster);
}

// What all blocks of the cluster pushed here of a part of the block's own row i, by a warp.
template <uint32_t kN, uint32_t kCluster>
inline RowState add_pushed(const DecodeUnit& u, const DecodeStates& states, const float* pushed,
                           uint32_t i, uint32_t part, RowPart<kN>& sum) {
  const uint32_t stride = (u.rows + kCluster - 1) / kCluster * (kN + 2);
  wait_for_pushes(&states.pushes);
  const float* const row = pushed + i * (kN + 2);
  float max = minus_infinity();
#pragma unroll
  for (uint32_t b = 0; b < kCluster; ++b) max = fmaxf(max, row[b * stride + kN]);
  const float base = max == minus_infinity() ? 0.0f : max;
  RowState all = {max, 0};
#pragma unroll
  for (uint32_t e = 0; e < sum.kEach; ++e) sum.x[e] = 0;
#pragma unroll
  for (uint32_t b = 0; b < kCluster; ++b) {
    const float weight = exp2_fast(row[b * stride + kN] - base);
    all.sum += row[b * stride + kN + 1] * weight;
#pragma unroll
    for (uint32_t e = 0; e < sum.kEach; e += 2) {
      const float2 x = *reinterpret_cast<const float2*>(row + b * stride + sum.place(part) + e);
      sum.x[e] = add_weighted(x.x, weight, sum.x[e]);
      sum.x[e + 1] = add_weighted(x.y, weight, sum.x[e + 1]);
    }
  }
  return all;
}

// What is pushed to this block, in bytes.
template <uint32_t kCluster>
inline uint32_t pushed_bytes(const DecodeUnit& u, uint32_t n) {
  return OwnRows<kCluster>(u).count * kCluster * (n + 2) * 4;
}

// Adds one to a row's counter: whether all clusters have left the row.
inline bool is_last(const RowEnd& end, uint32_t clusters) {
  auto* const counter = pointer<uint32_t>(end.counter);
  const bool last = add_ordered(counter) + 1 == clusters;
  if (last) *counter = 0;  // for the next replay
  return last;
}

// From what the warps left in shared memory to the output, or to what is left of it. A warp takes
// parts of rows. The last block to have left a row joins it; where rows have one part, every warp
// finds that out for its own and waits for no other.
template <class Shape, uint32_t kCluster>
inline void finish(uint32_t wanted, const DecodeUnit& u, DecodeStates& states, const float* sums,
                   uint32_t pitch, uint32_t busy, float* wide) {
  constexpr uint32_t kN = Shape::kN, kAtOnce = kCluster == 1 ? 16 : 8;
  constexpr uint32_t kParts = RowPart<kN>::kParts, kEach = RowPart<kN>::kEach;
  constexpr uint32_t kBlocks = Shape::kBlocks;
  const uint32_t warp = warp_number(), warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t clusters = clusters_of<kCluster>(u);
  const bool merges = wanted == abi::kAttentionMerged && clusters > 1;
  const bool partial = wanted == abi::kAttentionPartial;
  const OwnRows<kCluster> own(u);
  // The compiler would spend minutes on where addresses from shared memory may lie.
  const auto end_of = [&](uint32_t i) {
    RowEnd e = states.ends[own.row(i)];
    e.values = late(e.values), e.states = late(e.states), e.counter = late(e.counter);
    e.out = late(e.out), e.lse = late(e.lse), e.sink = late(e.sink);
    return e;
  };
  RowPart<kN> part;
  __syncthreads();
  if constexpr (kCluster > 1) {
    cluster_wait();
    for (uint32_t i = warp; i < u.rows * kParts; i += warps) {
      const RowState state =
          add_warps<Shape>(states, sums, pitch, busy, i / kParts, i % kParts, part);
      push_part<kN, kCluster>(u, states, i / kParts, i % kParts, state, part, wide);
    }
  }
  const auto take = [&](uint32_t i, uint32_t which) {
    if constexpr (kCluster > 1) {
      return add_pushed<kN, kCluster>(u, states, wide, i, which, part);
    } else {
      return add_warps<Shape>(states, sums, pitch, busy, own.row(i), which, part);
    }
  };
  if (!merges) {
    for (uint32_t i = warp; i < own.count * kBlocks; i += warps) {
      float x[kN / kWarp];
      RowState state;
#pragma unroll
      for (uint32_t which = 0; which < kParts; ++which) {
        state = take(i / kBlocks, which);
#pragma unroll
        for (uint32_t e = 0; e < kEach; ++e) x[which * kEach + e] = part.x[e];
      }
      store_row<Shape>(end_of(i / kBlocks), partial, i % kBlocks, state, x);
    }
    return;
  }
  for (uint32_t i = warp; i < own.count * kParts; i += warps) {
    const RowState state = take(i / kParts, i % kParts);
    const uint32_t cluster = blockIdx.x / kCluster;
    const RowEnd end = end_of(i / kParts);
    float* const to = pointer<float>(end.values) + cluster * kN + part.place(i % kParts);
    *reinterpret_cast<typename RowPart<kN>::Vector*>(to) = part.all;
    if (lane == 0 && i % kParts == 0)
      pointer<float2>(end.states)[cluster] = make_float2(state.max, state.sum);
  }
  if constexpr (kParts == 1) {
    __syncwarp();
    const uint32_t asked = warp + lane * warps;  // a lane for each of the warp's rows
    const bool last = asked < own.count && is_last(end_of(asked), clusters);
    uint32_t to_join = __ballot_sync(kAll, last);
    __syncwarp();
    for (uint32_t i = warp; to_join != 0; i += warps, to_join /= 2) {
      if (to_join % 2 == 0) continue;
      const RowState state = join_part<kN, kAtOnce>(end_of(i), 0, clusters, part);
      store_row<Shape>(end_of(i), partial, 0, state, part.x);
    }
  } else {
    __syncthreads();
    if (threadIdx.x < own.count) states.last[threadIdx.x] = is_last(end_of(threadIdx.x), clusters);
    __syncthreads();
    for (uint32_t i = warp; i < own.count * kParts; i += warps) {
      const uint32_t r = i / kParts;
      if (!states.last[r]) continue;
      const RowState state = join_part<kN, kAtOnce>(end_of(r), i % kParts, clusters, part);
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e)
        wide[r * kN + i % kParts * RowPart<kN>::kSize + lane + e * kWarp] = part.x[e];
      if (lane == 0) states.of_row[r] = make_float2(state.max, state.sum);
    }
    __syncthreads();
    for (uint32_t i = warp; i < own.count * kBlocks; i += warps) {
      const uint32_t r = i / kBlocks;
      if (!states.last[r]) continue;
      float x[kN / kWarp];
#pragma unroll
      for (uint32_t e = 0; e < kN / kWarp; ++e) x[e] = wide[r * kN + lane + e * kWarp];
      store_row<Shape>(end_of(r), partial, i % kBlocks, {states.of_row[r].x, states.of_row[r].y},
                       x);
    }
  }
}

}  // namespace gyre::cuda
