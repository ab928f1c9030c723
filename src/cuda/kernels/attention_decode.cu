// Attention of a few rows over many keys, as in decoding. A block is one KV head, up to 8 or 16 of
// its (token, query head) rows and one split of the keys; every warp of it works alone on 16 or 32
// keys at a time, from their copy into shared memory to its own sums. The warps meet once, at the
// end; the last block of a head to come there puts the splits together.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats for each row and split.
#include "attention_decode_copy.cuh"
#include "attention_decode_values.cuh"

namespace gyre::cuda {

enum DecodeArg : uint32_t {
  arg_q,
  arg_k_codes,
  arg_k_scales,
  arg_v_codes,
  arg_v_scales,
  arg_out,
  arg_lse,
  arg_sinks,
  arg_slopes,
  arg_tree,
  arg_partial,
  arg_state
};

template <uint32_t kKeys, uint32_t kValues, uint32_t kDim>
struct Decode {
  static constexpr uint32_t kK = kKeys, kV = kValues, kN = kDim;
  static constexpr DecodeShape kShape = decode_shape(kK, kV, kN);
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  static constexpr uint32_t kTiles = kShape.tiles, kBlocks = kShape.blocks;
  static_assert(kShape.fits);

  // Where the key in column c of product t lies, and which it is: two neighbours of a tile go to
  // two columns.
  static constexpr bool kTurned = kLevelsV && value_item<kV>(1) != 1;
  static constexpr uint32_t place(uint32_t t, uint32_t c) {
    return kLevelsV ? c / 2 * 8 + 2 * t + c % 2 : 8 * t + c;
  }
  static constexpr uint32_t key(uint32_t t, uint32_t c) {
    if constexpr (kLevelsV) return c / 2 * 8 + value_item<kV>(2 * t + c % 2);
    return 8 * t + c;
  }
};

// What a block is to do; the same in every thread.
struct DecodeUnit {
  uint32_t kv_head, rows, group;
  uint32_t length, tokens;
  uint32_t first;   // the oldest key that one of the rows sees, in this split
  uint32_t splits;  // that have keys
  bool paired, alike;
  bool plain;  // no soft cap, no slopes
  DecodeWalk walk;
};

struct RowBounds {
  uint32_t begin, end;
};

// Keys of [first, last) that a token's causal bound and window leave.
inline RowBounds row_bounds(const abi::AttentionParams& p, const DecodeUnit& u, uint32_t token,
                            uint32_t first, uint32_t last) {
  const int32_t position = static_cast<int32_t>(u.length + token) - static_cast<int32_t>(u.tokens);
  int32_t begin = 0, end = static_cast<int32_t>(u.length);
  const auto window = static_cast<int32_t>(abi::kv_least(p.window, 0x7FFFFFFF));
  if (window != 0) begin = position + 1 - window;
  if (p.causal != 0) end = position + 1;
  const auto clamp = [&](int32_t x) {
    const auto low = static_cast<int32_t>(first), high = static_cast<int32_t>(last);
    return static_cast<uint32_t>(x < low ? low : (x > high ? high : x));
  };
  return {clamp(begin), clamp(end)};
}

inline DecodeUnit make_unit(const abi::AttentionParams& p, const Args& args) {
  const uint64_t state = args.at[arg_state];
  DecodeUnit u = {};
  const auto small = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const uint32_t split = blockIdx.x, splits = gridDim.x;
  u.kv_head = blockIdx.z;
  u.tokens = small(p.tokens);
  u.group = small(p.heads) / gridDim.z;
  u.rows = u.tokens * u.group;
  u.paired = u.rows <= 4;
  u.plain = p.soft_cap == 0 && args.at[arg_slopes] == 0;
  uint32_t first_key = small(p.first_key), end_key = small(p.end_key);
  uint32_t split_keys = small(p.split_keys);
  u.length = small(p.length);
  if (state != 0) {
    const abi::KvState now = *pointer<const abi::KvState>(state);
    const abi::KvKeys keys = abi::kv_segment_keys(p.segment, p.places, now);
    u.length = small(now.length), end_key = small(keys.end);
    first_key = small(abi::kv_least(
        abi::kv_most(keys.begin, abi::attention_first_key(p.tokens, now.length, p.window)),
        keys.end));
    const uint32_t each = (end_key - first_key + splits - 1) / splits;
    const uint32_t unit = small(abi::kSplitUnit), whole = (each + unit - 1) / unit * unit;
    split_keys = whole > p.fewest_split_keys ? whole : p.fewest_split_keys;
  }
  const uint32_t keys = end_key - first_key;
  u.splits = split_keys == 0 ? 1 : (keys + split_keys - 1) / split_keys;
  if (u.splits == 0) u.splits = 1;
  uint32_t first = first_key + split * split_keys, last = end_key;
  if (first > end_key) first = end_key;
  if (splits > 1 && end_key - first > split_keys) last = first + split_keys;
  // Bounds grow with the token: the first row's beginning and the last one's end hold all.
  const RowBounds oldest = row_bounds(p, u, 0, first, last);
  const RowBounds newest = row_bounds(p, u, u.tokens - 1, first, last);
  u.alike = oldest.begin == newest.begin && oldest.end == newest.end;
  u.first = oldest.begin;
  const uint32_t count = newest.end > oldest.begin ? newest.end - oldest.begin : 0;
  const auto capacity = small(p.capacity);
  uint32_t slot = small(p.ring_start) + u.first;
  if (slot >= capacity && capacity != 0) slot %= capacity;
  u.walk = decode_walk(capacity, slot, count);
  return u;
}

// Rows are (token, query head) pairs, the head running fastest.
struct RowPlace {
  uint32_t token, head;
};
inline RowPlace row_place(const DecodeUnit& u, uint32_t r) {
  const uint32_t token = r / u.group;
  return {token, u.kv_head * u.group + (r - token * u.group)};
}

// In shared memory.
struct DecodeStates {
  float2 of_warp[kDecodeMostWarps][kDecodeMostRows];  // max, sum
  float factor[kDecodeMostRows][2];  // what scores are multiplied with, in two steps
  float2 of_row[kDecodeMostRows];
  uint32_t last;
};
static_assert(sizeof(DecodeStates) <= kDecodeStateBytes);

// Stages 32, 64, ... in a lane's registers, 1 to 16 between lanes; lane i has coordinates i + 32 c.
template <uint32_t kN>
inline void hadamard_lanes(float (&x)[kN / kWarp]) {
#pragma unroll
  for (uint32_t h = 1; h < kN / kWarp; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b, x[i + h] = a - b;
    }
  }
#pragma unroll
  for (uint32_t h = 1; h < kWarp; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) {
      const float other = __shfl_xor_sync(kAll, x[i], static_cast<int>(h));
      x[i] = (threadIdx.x & h) != 0 ? other - x[i] : x[i] + other;
    }
  }
}

template <uint32_t kFormat, uint32_t kN>
inline void flip_lanes(float (&x)[kN / kWarp], float factor) {
#pragma unroll
  for (uint32_t i = 0; i < kN / kWarp; ++i)
    x[i] *= abi::kv_sign_bit(threadIdx.x % kWarp + i * kWarp) != 0 ? -factor : factor;
}

constexpr float inverse_root(uint32_t n) {
  return n == 64 ? 0.125f : (n == 128 ? 0.0883883476f : (n == 256 ? 0.0625f : 0.0441941738f));
}

// A query becomes integers below 2^14, or floats below 2^15.
template <class Shape>
inline void load_query(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t q, uint32_t r,
                       float* row, float (&factor)[2]) {
  constexpr uint32_t kEach = Shape::kN / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  const RowPlace at = row_place(u, r);
  const uint64_t from = q + at.token * p.q_token_stride + at.head * p.q_head_stride;
  float x[kEach], largest = 0;
  bool finite = true;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) x[i] = load_as_float(from, p.q_dtype, lane + i * kWarp);
  if constexpr (Shape::kLevelsK) {
    flip_lanes<Shape::kK, Shape::kN>(x, 1.0f);
    hadamard_lanes<Shape::kN>(x);
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    if constexpr (Shape::kLevelsK) x[i] *= inverse_root(Shape::kN);
    largest = fmaxf(largest, fabsf(x[i]));
    finite = finite && is_finite(x[i]);
  }
  largest = warp_max(largest);
  finite = __all_sync(kAll, finite) != 0;
  const int32_t top = Shape::kLevelsK ? 13 : 14;
  const int32_t up = largest == 0 || !finite ? 0 : top - exponent_of(largest);
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
    row[lane + i * kWarp] = finite ? times_power(x[i], up) : 0.0f;
  if (lane == 0) {
    factor[0] = finite ? power_of_two(-up >> 1) : __uint_as_float(0x7FC00000u);
    factor[1] = power_of_two(-up - (-up >> 1));
  }
}

// Of a lane's row, for masks.
struct MaskRow {
  float slope, offset;  // offset: first key less the query's position
  uint32_t begin, end;  // keys it sees, counted from the unit's first
};

// cap tanh(x / cap); two terms of the series where 1 - e cancels.
inline float soft_cap(float x, float cap) {
  const float a = fabsf(x) / cap, e = exp2_fast(a * (-2 * kLog2E));
  const float t = a < 0.04f ? a - a * a * a * (1.0f / 3) : (1.0f - e) / (1.0f + e);
  return copysignf(t * cap, x);
}

// Scale of slot i of the tile whose eight scales these are.
inline float scale_in(const uint4& scales, uint32_t i) {
  const uint32_t words[4] = {scales.x, scales.y, scales.z, scales.w};
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 15 & 0x7FFF8000u
                                    : words[i / 2] >> 1 & 0x7FFF8000u);
}

// What is not plain: a soft cap, slopes, keys that a row does not see. Logits in base 2.
template <class Shape>
inline void mask_scores(const abi::AttentionParams& p, const DecodeUnit& u, const MaskRow& row,
                        uint32_t begin, float (&x)[Shape::kTiles][2]) {
  const uint32_t j = threadIdx.x % 4;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kTiles * 2; ++i) {
    float& s = x[i / 2][i % 2];
    const uint32_t key = u.walk.key_of(begin + Shape::key(i / 2, 2 * j + i % 2));
    if (!u.plain) {
      if (p.soft_cap > 0) s = soft_cap(s, p.soft_cap);
      s = (s + row.slope * (static_cast<float>(static_cast<int32_t>(key)) + row.offset)) * kLog2E;
    }
    if (key == ~0u || key < row.begin || key >= row.end) s = minus_infinity();
  }
}

template <class Shape, uint32_t kRows>
inline void work_on_chunk(const abi::AttentionParams& p, const DecodeUnit& u, const Tables& tables,
                          const uint4* q, const unsigned char* stage, uint32_t chunk,
                          const ScoreFactors (&factors)[kRows / 8], const MaskRow (&of)[kRows / 8],
                          DecodeRow (&row)[kRows / 8], float (&acc)[kRows / 8][Shape::kN / 16][4]) {
  constexpr uint32_t kT = Shape::kTiles, kHalves = kRows / 8;
  const uint32_t j = threadIdx.x % 4;
  float x[kHalves][kT][2];
  if constexpr (Shape::kLevelsK) {
    const unsigned char* const scales = stage + Shape::kShape.k_scales;
    score_levels<Shape, kRows>(
        tables, q, stage, factors,
        [&](uint32_t block, uint32_t t, uint32_t i) {
          if constexpr (Shape::kLevelsV) {
            const uint4 all =
                *reinterpret_cast<const uint4*>(scales + (j * Shape::kBlocks + block) * 16);
            return scale_in(all, value_item<Shape::kV>(2 * t + i)) * 0x1p-31f;
          }
          const uint32_t two = *reinterpret_cast<const uint32_t*>(
              scales + (t * Shape::kBlocks + block) * 16 + j * 4);
          return scale_in(make_uint4(two, 0, 0, 0), i) * 0x1p-31f;
        },
        x);
  } else {
    score_halves<Shape, kRows>(q, stage, factors, x);
  }
  const uint32_t begin = chunk * Shape::kShape.keys;
  const bool as_it_is = u.plain && u.alike && u.walk.whole(begin, begin + Shape::kShape.keys);
  if (!as_it_is) {
#pragma unroll
    for (uint32_t h = 0; h < kHalves; ++h) mask_scores<Shape>(p, u, of[h], begin, x[h]);
  }
#pragma unroll
  for (uint32_t h = 0; h < kHalves; ++h) fold_scores(x[h], row[h], acc[h]);
  if constexpr (Shape::kLevelsV) {
    ByteWeights w[kHalves][Shape::kBlocks];
#pragma unroll
    for (uint32_t block = 0; block < Shape::kBlocks; ++block) {
      const uint4 scales = *reinterpret_cast<const uint4*>(stage + Shape::kShape.v_scales +
                                                           (j * Shape::kBlocks + block) * 16);
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h)
        w[h][block] = byte_weights(
            x[h], [&](uint32_t i) { return scale_in(scales, value_item<Shape::kV>(i)); }, u.paired);
    }
    add_levels<Shape, kHalves>(tables, stage, w, acc);
  } else {
    add_halves<Shape, kHalves>(stage, x, acc);
  }
}

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
      if constexpr (Shape::kV == kDecodeF16) factor *= power_of_two(-kWeightUp);
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

// The other splits' states of the unit's rows join this block's. Every thread takes coordinates.
template <class Shape>
inline void join_splits(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t partial,
                        DecodeStates& states, float* wide) {
  constexpr uint32_t kN = Shape::kN, kAtOnce = 16;
  const uint64_t stride = p.tokens * p.heads * (kN + 2);
  for (uint32_t i = threadIdx.x; i < u.rows * kN; i += blockDim.x) {
    const RowPlace at = row_place(u, i / kN);
    const float* const row = partial_row(p, partial, 0, at.token, at.head, kN);
    RowState all = {minus_infinity(), 0};
    float total = 0;
    for (uint32_t first = 0; first < u.splits; first += kAtOnce) {
      float x[kAtOnce];
      float2 state[kAtOnce];
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const bool there = first + s < u.splits;
        const float* const from = row + (first + s) * stride;
        x[s] = there ? load_fresh(from + i % kN) : 0.0f;
        state[s] = there ? load_fresh(reinterpret_cast<const float2*>(from + kN))
                         : make_float2(minus_infinity(), 0.0f);
      }
      float max = all.max;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) max = fmaxf(max, state[s].x);
      const float from = max == minus_infinity() ? 0.0f : max, keep = exp2_fast(all.max - from);
      total *= keep, all.sum *= keep, all.max = max;
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        const float weight = exp2_fast(state[s].x - from);
        all.sum += state[s].y * weight, total += weight == 0 ? 0.0f : x[s] * weight;
      }
    }
    wide[i] = total;
    if (i % kN == 0) states.of_row[i / kN] = make_float2(all.max, all.sum);
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
    flip_lanes<Shape::kV, kN>(x, inverse_root(kN));
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

// The blocks of a cluster are all splits of a head: each puts some rows together, a warp to a row,
// from what all have in their shared memory.
template <class Shape>
inline void store_rows_of_cluster(const abi::AttentionParams& p, const DecodeUnit& u,
                                  const Args& args, const DecodeStates& states, const float* wide) {
  constexpr uint32_t kN = Shape::kN, kEach = kN / kWarp, kMost = 16;
  const uint32_t blocks = cluster_blocks(), lane = threadIdx.x % kWarp;
  cluster_sync();
  for (uint32_t r = cluster_rank() + threadIdx.x / kWarp * blocks; r < u.rows;
       r += blockDim.x / kWarp * blocks) {
    float2 of[kMost];
    float max = minus_infinity();
#pragma unroll
    for (uint32_t b = 0; b < kMost; ++b) {
      of[b] = make_float2(minus_infinity(), 0.0f);
      if (b < blocks) of[b] = load_of_block(&states.of_row[r], b);
      max = fmaxf(max, of[b].x);
    }
    const float from = max == minus_infinity() ? 0.0f : max;
    float x[kEach] = {}, sum = 0;
#pragma unroll
    for (uint32_t b = 0; b < kMost; ++b) {
      if (b >= blocks) break;
      const float weight = exp2_fast(of[b].x - from);
      sum += of[b].y * weight;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const float value = load_of_block(wide + r * kN + lane + i * kWarp, b);
        x[i] += weight == 0 ? 0.0f : value * weight;
      }
    }
    store_row<Shape>(p, u, args, r, {max, sum}, x);
  }
  cluster_sync();  // until then others read here
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
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const counter = counters + u.kv_head;
    const uint32_t before = atomicAdd(counter, 1u);
    states.last = before + 1 == u.splits ? 1 : 0;
    if (states.last != 0) *counter = 0;  // for the next replay
    __threadfence();
  }
  __syncthreads();
  return states.last != 0;
}

template <uint32_t kK, uint32_t kV, uint32_t kN, uint32_t kRows>
__global__ void __launch_bounds__(decode_most_warps(kK, kV, kN, kRows) * 32, 1)
    attention_decode(const abi::AttentionParams p, const Args args) {
  using Shape = Decode<kK, kV, kN>;
  constexpr uint32_t kHalves = kRows / 8;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4;
  const uint32_t warps = blockDim.x / kWarp;
  unsigned char* const shared = dynamic_shared();
  constexpr DecodeRooms kRooms = decode_rooms(kK, kV, kN, kRows);
  const uint32_t stages = opaque(decode_stages(kRooms, warps, dynamic_shared_bytes()));
  auto& states = *reinterpret_cast<DecodeStates*>(shared);
  auto* const wide = reinterpret_cast<float*>(shared + kRooms.wide);
  const DecodeUnit u = make_unit(p, args);
  // A block of a cluster has to be there, even if it has no keys.
  const bool cluster = cluster_blocks() > 1;
  if (blockIdx.x >= u.splits && p.partial != abi::kAttentionPartial && !cluster) return;

  auto* const mine = reinterpret_cast<uint32_t*>(wide) + threadIdx.x;
  const ChunkCopy<Shape> copy(p, args.at[arg_k_codes], args.at[arg_k_scales], args.at[arg_v_codes],
                              args.at[arg_v_scales], u.kv_head, mine);
  const uint32_t chunks = (u.walk.tiles + Shape::kTiles - 1) / Shape::kTiles;
  unsigned char* const ring = shared + kRooms.ring + warp * stages * Shape::kShape.bytes;
  for (uint32_t i = 0; i + 1 < stages; ++i)
    copy.start(u.walk, warp + i * warps, ring + i * Shape::kShape.bytes);

  // Rows that are only there to fill a product repeat real ones.
  for (uint32_t r = warp; r < u.rows; r += warps)
    load_query<Shape>(p, u, args.at[arg_q], r, wide + r * kN, states.factor[r]);
  __syncthreads();
  const auto real_row = [&](uint32_t r) { return u.paired ? r % 4 % u.rows : r % u.rows; };
  auto* const operands = reinterpret_cast<uint4*>(shared + kRooms.queries);
  make_operands<kK, kN, kRows>([&](uint32_t r) { return wide + real_row(r) * kN; }, operands);
  __syncthreads();

  const auto* const slopes = pointer<const float>(args.at[arg_slopes]);
  const Table of_k = make_table<kK>(mine);
  const Tables tables = {of_k, kK == kV ? of_k : make_table<kV>(mine), keep(kMagicBits, mine)};
  ScoreFactors factors[kHalves];
  MaskRow of[kHalves];
  DecodeRow row[kHalves];
#pragma unroll
  for (uint32_t h = 0; h < kHalves; ++h) {
    const uint32_t r = real_row(g + 8 * h);
    const RowPlace at = row_place(u, r);
    const RowBounds b = row_bounds(p, u, at.token, u.first, u.length);
    const int32_t position =
        static_cast<int32_t>(u.length + at.token) - static_cast<int32_t>(u.tokens);
    factors[h] = {states.factor[r][0], states.factor[r][1] * p.scale * (u.plain ? kLog2E : 1.0f)};
    of[h] = {args.at[arg_slopes] == 0 ? 0.0f : slopes[at.head],
             static_cast<float>(static_cast<int32_t>(u.first) - position), b.begin - u.first,
             b.end - u.first};
    row[h] = {kLowest, minus_infinity(), 0};
  }
  float acc[kHalves][kN / 16][4] = {};
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t chunk = warp; chunk < chunks; chunk += warps) {
    wait_for_stage(stages);
    const uint32_t free = slot == 0 ? stages - 1 : slot - 1;
    copy.start(u.walk, chunk + (stages - 1) * warps, ring + free * Shape::kShape.bytes);
    work_on_chunk<Shape, kRows>(p, u, tables, operands + lane, ring + slot * Shape::kShape.bytes,
                                chunk, factors, of, row, acc);
    slot = slot + 1 == stages ? 0 : slot + 1;
  }
  copy_wait<0>();
  const uint32_t busy = chunks < warps ? (chunks == 0 ? 1 : chunks) : warps;
  join_warps<Shape, kRows>(u, states, wide, reinterpret_cast<float*>(shared + kRooms.ring), busy,
                           row, acc);
  if (cluster) {
    store_rows_of_cluster<Shape>(p, u, args, states, wide);
    return;
  }
  if (p.partial == abi::kAttentionMerged && u.splits > 1) {
    auto* const counters = pointer<uint32_t>(args.at[arg_partial]);
    const uint64_t partial = args.at[arg_partial] + abi::attention_counters(p.kv_heads) * 4;
    if (!hand_over<Shape>(p, u, partial, counters, states, wide)) return;
    join_splits<Shape>(p, u, partial, states, wide);
  }
  store_rows<Shape>(p, u, args, states, wide);
}

}  // namespace gyre::cuda
