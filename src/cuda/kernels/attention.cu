// out = softmax(scale q k^T, capped, biased, masked) v, or the partial state of a split.
// A block is one KV head, one split of the keys and up to 16 of the head's (token, query head)
// rows. It walks the split in chunks of 64 keys (fewer where rows are long): bytes come to shared
// memory asynchronously, each is read from memory once; then 16 keys to a warp are scored, a warp
// to a row makes weights, and every warp adds up its own 16-wide tiles of V's coordinates.
// Products run on tensor cores: int8 levels times 16-bit queries (K), f16 levels times f16 weights
// (V), f16 and bf16 in two parts where one is not exact enough; f32 and compat in f32.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats a row.
// Decoding has a way of its own, attention_alone.cuh.
#include "attention_alone.cuh"

namespace gyre::cuda {

enum AttentionArg : uint32_t {
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

struct Bounds {
  int64_t begin, end, position;
};

inline int64_t clamp_key(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Keys of [first, last) that a token's causal bound and window leave.
inline Bounds bounds_of(const abi::AttentionParams& p, uint64_t token, int64_t first,
                        int64_t last) {
  constexpr uint64_t kFar = uint64_t{1} << 62;
  const auto length = static_cast<int64_t>(p.length);
  const int64_t position = length - static_cast<int64_t>(p.tokens) + static_cast<int64_t>(token);
  const auto window = static_cast<int64_t>(abi::kv_least(p.window, kFar));
  const int64_t begin = window == 0 ? 0 : position + 1 - window;
  const int64_t end = p.causal != 0 ? clamp_key(position + 1, 0, length) : length;
  return {clamp_key(begin, first, last), clamp_key(end, first, last), position};
}

inline void next_unit(Unit& u) {
  __syncthreads();
  if (threadIdx.x == 0) u.index += gridDim.x;
  __syncthreads();
}

// Which rows and keys the unit with this index has; neighbours share keys. One thread.
inline void place_unit(Unit& u, const Args& args) {
  const abi::AttentionParams& p = u.params;
  const uint64_t rows = p.tokens * u.group, tiles = (rows + u.plan.rows - 1) / u.plan.rows;
  const uint64_t piece = divide(u.index, tiles), head = divide(piece, p.splits);
  u.split = piece - head * p.splits;
  u.kv_head = head;
  u.first_row = (u.index - piece * tiles) * u.plan.rows;
  u.rows = static_cast<uint32_t>(abi::kv_least(rows - u.first_row, u.plan.rows));
  u.k_codes = pointer<const uint8_t>(args.at[arg_k_codes]) + u.kv_head * p.k.codes_head_stride;
  u.k_scales = pointer<const uint8_t>(args.at[arg_k_scales]) + u.kv_head * p.k.scales_head_stride;
  u.v_codes = pointer<const uint8_t>(args.at[arg_v_codes]) + u.kv_head * p.v.codes_head_stride;
  u.v_scales = pointer<const uint8_t>(args.at[arg_v_scales]) + u.kv_head * p.v.scales_head_stride;
  const uint64_t first = abi::kv_least(p.first_key + u.split * p.split_keys, p.end_key);
  const uint64_t last = p.partial == 0 ? p.end_key : abi::kv_least(first + p.split_keys, p.end_key);
  u.first_key = static_cast<int64_t>(first), u.last_key = static_cast<int64_t>(last);
  // Bounds grow with the token: the first row's beginning and the last one's end hold all.
  const Bounds oldest = bounds_of(p, u.token(0), u.first_key, u.last_key);
  const Bounds newest = bounds_of(p, u.token(u.rows - 1), u.first_key, u.last_key);
  u.walk = make_walk(p, oldest.begin, newest.end);
  const uint64_t all =
      reinterpret_cast<uint64_t>(u.k_codes) | reinterpret_cast<uint64_t>(u.v_codes) |
      reinterpret_cast<uint64_t>(u.k_scales) | reinterpret_cast<uint64_t>(u.v_scales) |
      p.k.codes_tile_stride / abi::kKvTile | p.k.scales_tile_stride |
      p.v.codes_tile_stride / abi::kKvTile | p.v.scales_tile_stride;
  const uint64_t longest =
      abi::kv_most(abi::kv_most(p.k.codes_tile_stride, p.v.codes_tile_stride),
                   abi::kv_most(p.k.scales_tile_stride, p.v.scales_tile_stride));
  u.alike = oldest.begin == newest.begin && oldest.end == newest.end && all % 16 == 0 &&
            longest < kMostAloneStride && u.walk.count < kMostAloneKeys && p.soft_cap == 0 &&
            args.at[arg_slopes] == 0 && args.at[arg_tree] == 0;
}

inline void start_rows(const Unit& u, const float* slopes) {
  Rows& state = u.state();
  for (uint32_t r = threadIdx.x; r < kMostRows; r += blockDim.x) {
    const uint64_t token = u.token(r < u.rows ? r : 0);
    const Bounds b = bounds_of(u.params, token, u.first_key, u.last_key);
    state.begin[r] = b.begin, state.end[r] = b.end, state.position[r] = b.position;
    state.max[r] = minus_infinity(), state.sum[r] = 0;
    state.slope[r] = slopes == nullptr || r >= u.rows ? 0.0f : slopes[u.head(r)];
  }
}

// {values, max, sum} of one split, or the finished row. One warp; `row` is in shared memory.
inline void store_row(const Unit& u, const Args& args, uint32_t r) {
  const abi::AttentionParams& p = u.params;
  const uint32_t n = p.v.head_dim, lane = threadIdx.x % kWarp;
  const float* const row = u.wide() + r * n;
  const uint64_t token = u.token(r), head = u.head(r);
  RowState state = {u.state().max[r], u.state().sum[r]};
  if (p.partial != 0) {
    float* const place = pointer<float>(args.at[arg_partial]) +
                         ((u.split * p.tokens + token) * p.heads + head) * (n + 2);
    for (uint32_t c = lane; c < n; c += kWarp) place[c] = row[c];
    if (lane == 0) place[n] = state.max * kLn2, place[n + 1] = state.sum;
    return;
  }
  const float factor = finish_row(state, pointer<const float>(args.at[arg_sinks]), head);
  const uint64_t out = args.at[arg_out] + token * p.out_token_stride + head * p.out_head_stride;
  for (uint32_t c = lane; c < n; c += kWarp) store_float(out, p.out_dtype, c, row[c] * factor);
  if (lane == 0 && args.at[arg_lse] != 0) {
    *pointer<float>(args.at[arg_lse] + token * p.lse_token_stride + head * p.lse_head_stride) =
        log_sum_exp(state);
  }
}

// Sums from registers to rows in shared memory, rotated back and written.
template <uint32_t kV>
inline void store_rows(const Unit& u, const Args& args, const float (&acc)[kMostTiles][2][4]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n = u.params.v.head_dim;
  __syncthreads();  // wide() may lie where the stages were
#pragma unroll
  for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
    const uint32_t column = (tile * u.plan.warps + warp) * 16 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t row = i / 4 * 8 + lane % 4 * 2 + i % 2, c = column + i / 2 % 2 * 8;
      if (c < n && row < u.rows) u.wide()[row * n + c] = acc[tile][i / 4][i % 4];
    }
  }
  __syncthreads();
  for (uint32_t r = warp; r < u.rows; r += u.plan.warps) {
    restore<kV>(u.wide() + r * n, n);
    store_row(u, args, r);
  }
}

inline void wait_for_chunk(uint32_t stages) {
  if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<0>();
  }
}

template <uint32_t kK, uint32_t kV>
inline void attend(const Unit& u, const Args& args) {
  const abi::AttentionParams& p = u.params;
  const auto chunks =
      static_cast<uint32_t>((u.walk.tiles * abi::kKvTile + u.plan.chunk - 1) / u.plan.chunk);
  // With one stage a chunk is asked for when it is needed.
  const uint32_t ahead = u.plan.stages - 1;
  if (u.plan.early != 0) {
    for (uint32_t i = 0; i < ahead; ++i) load_chunk<kK, kV>(u, p, i);
  }
  start_rows(u, pointer<const float>(args.at[arg_slopes]));
  clear_weights(u);
  load_queries<kK>(u, p, args.at[arg_q]);
  __syncthreads();
  make_fragments<kK>(u, p.k.head_dim);
  if (u.plan.early == 0) {
    __syncthreads();
    for (uint32_t i = 0; i < ahead; ++i) load_chunk<kK, kV>(u, p, i);
  }
  float acc[kMostTiles][2][4] = {};
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    if (ahead == 0) {
      __syncthreads();
      load_chunk<kK, kV>(u, p, chunk);
    }
    wait_for_chunk(u.plan.stages);
    __syncthreads();  // the chunk is there, and nobody uses the one before it
    if (ahead != 0) load_chunk<kK, kV>(u, p, chunk + ahead);
    score_chunk<kK>(u, p, chunk);
    if (threadIdx.x == 0) u.state().hidden = 0;
    __syncthreads();
    for (uint32_t r = threadIdx.x / kWarp; r < u.rows; r += u.plan.warps)
      fold_row<kV>(u, p, chunk, r, pointer<const uint8_t>(args.at[arg_tree]));
    __syncthreads();
    add_values<kV>(u, p, chunk, acc);
  }
  store_rows<kV>(u, args, acc);
}

// The warps' sums together: each on its own scale to shared memory, then a warp to a row.
template <class Shape, uint32_t kV, uint32_t kN>
inline void store_alone(const Unit& u, const Args& args, const AloneRow& row,
                        float (&acc)[kN / 16][4]) {
  constexpr uint32_t kPitch = Shape::kSumsPitch;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  float sum = row.sum + __shfl_xor_sync(kAll, row.sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  auto* const states = reinterpret_cast<float2*>(u.shared() + u.plan.logits);
  auto* const sums = reinterpret_cast<float*>(states + kAloneWarps * 8);
  __syncthreads();  // where the keys were
  if (j == 0) states[warp * 8 + g] = make_float2(row.max, sum);
  __syncthreads();
  float max = minus_infinity();
#pragma unroll
  for (uint32_t i = 0; i < kAloneWarps; ++i) max = fmaxf(max, states[i * 8 + g].x);
  const float from = max == minus_infinity() ? 0.0f : max;
  float factor = exp2_fast(row.max - from);
  if constexpr (Shape::kLevelsV) factor = times_power(factor, kScaleBias - row.up);
  if constexpr (kV == kPlanF16) factor *= power_of_two(-kWeightTop);
  rescale_alone(factor, acc);
#pragma unroll
  for (uint32_t i = 0; i < kN / 4; ++i) {
    const uint32_t column = i / 4 * 16 + i / 2 % 2 * 8 + g;
    sums[(warp * 8 + 2 * j + i % 2) * kPitch + column] = acc[i / 4][i % 4];
  }
  if (warp == 0 && j == 0) {
    float total = 0;
    for (uint32_t i = 0; i < kAloneWarps; ++i)
      total += states[i * 8 + g].y * exp2_fast(states[i * 8 + g].x - from);
    u.state().max[g] = max, u.state().sum[g] = total;
  }
  __syncthreads();
  for (uint32_t r = warp; r < u.rows; r += kAloneWarps) {
    for (uint32_t c = lane; c < kN; c += kWarp) {
      float total = 0;
#pragma unroll
      for (uint32_t i = 0; i < kAloneWarps; ++i) total += sums[(i * 8 + r) * kPitch + c];
      u.wide()[r * kN + c] = total;
    }
    __syncwarp();
    restore<kV>(u.wide() + r * kN, kN);
    store_row(u, args, r);
  }
}

inline void wait_alone(uint32_t stages) {
  if (stages == 2) {
    copy_wait<0>();
  } else if (stages == 3) {
    copy_wait<1>();
  } else {
    copy_wait<2>();
  }
  __syncwarp();
}

// A function of its own, or the compiler looks at all head dims at once, for minutes.
template <uint32_t kK, uint32_t kV, uint32_t kN>
__noinline__ void attend_alone(uint32_t stages) {
  const BlockState& block = *reinterpret_cast<BlockState*>(dynamic_shared());
  const Unit& u = block.unit;
  const Args& args = block.args;
  using Shape = Alone<kK, kV, kN>;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const AloneWalk walk = alone_walk(u.walk);
  const uint32_t chunks = (walk.tiles + Shape::kTiles - 1) / Shape::kTiles;
  unsigned char* const ring = u.shared() + u.plan.logits + warp * stages * Shape::kBytes;
  for (uint32_t i = 0; i + 1 < stages; ++i)
    load_alone<Shape, kK, kV>(u, walk, warp + i * kAloneWarps, ring + i * Shape::kBytes);
  load_queries<kK>(u, u.params, args.at[arg_q]);
  __syncthreads();
  make_fragments<kK>(u, kN);
  __syncthreads();
  const auto* const q = reinterpret_cast<const uint4*>(u.shared() + u.plan.q) + lane;
  const float factor = u.state().factor[g][0];
  const float scale = u.state().factor[g][1] * (u.params.scale * kLog2E);
  float acc[kN / 16][4] = {};
  AloneRow row = {minus_infinity(), 0, 0, kWeightTop};
  uint32_t slot = 0;
  for (uint32_t chunk = warp; chunk < chunks; chunk += kAloneWarps) {
    wait_alone(stages);
    const uint32_t free = slot == 0 ? stages - 1 : slot - 1;
    load_alone<Shape, kK, kV>(u, walk, chunk + (stages - 1) * kAloneWarps,
                              ring + free * Shape::kBytes);
    const unsigned char* const stage = ring + slot * Shape::kBytes;
    slot = slot + 1 == stages ? 0 : slot + 1;
    float x[Shape::kTiles][2];
    score_alone<Shape, kK, kV, kN>(q, stage, x);
    const uint32_t begin = chunk * Shape::kOf;
    const bool whole = walk.whole(begin, begin + Shape::kOf);
#pragma unroll
    for (uint32_t i = 0; i < Shape::kTiles * 2; ++i) {
      x[i / 2][i % 2] = x[i / 2][i % 2] * factor * scale;
      if (!whole && !walk.valid(begin + Shape::key(i / 2, 2 * j + i % 2)))
        x[i / 2][i % 2] = minus_infinity();
    }
    uint32_t w[Shape::kTiles], rest[Shape::kTiles];
    weigh_alone<Shape, kV>(stage, x, row, acc, w, rest);
    add_alone<Shape, kV, kN>(stage, w, rest, acc);
  }
  store_alone<Shape, kV, kN>(u, args, row, acc);
}

// Whether it was done.
template <uint32_t kK, uint32_t kV, uint32_t kN>
inline bool try_alone(const Unit& u) {
  using Shape = Alone<kK, kV, kN>;
  if constexpr (Shape::kFits) {
    if (!u.alike || u.params.k.head_dim != kN || u.params.v.head_dim != kN) return false;
    const uint32_t stages = alone_stages(Shape::kShape, u.plan, dynamic_shared_bytes());
    if (stages == 0) return false;
    attend_alone<kK, kV, kN>(stages);
    return true;
  }
  return false;
}

template <uint32_t kK, uint32_t kV>
inline bool try_alone(const Unit& u) {
  if constexpr (is_staged(kK) && is_staged(kV))
    return try_alone<kK, kV, 64>(u) || try_alone<kK, kV, 128>(u) || try_alone<kK, kV, 256>(u);
  return false;
}

// Formats known to the compiler.
inline abi::KvCacheLayout with_format(abi::KvCacheLayout layout, uint32_t format) {
  layout.format = format;
  return layout;
}

template <uint32_t kK, uint32_t kV>
__global__ void __launch_bounds__(512, 1)
    attention(const abi::AttentionParams params, const Args args) {
  Unit& u = reinterpret_cast<BlockState*>(dynamic_shared())->unit;
  if (threadIdx.x / kWarp == 0) {
    // A candidate to a lane: one after the other would take longer than the first keys.
    const abi::KvCacheLayout k = with_format(params.k, kK), v = with_format(params.v, kV);
    const uint64_t group = params.heads / params.kv_heads;
    const AttentionPlan plan = attention_candidate(k, v, params.tokens * group, threadIdx.x);
    const bool fits = threadIdx.x < kPlans && plan.total <= dynamic_shared_bytes();
    const int32_t first = __ffs(static_cast<int32_t>(__ballot_sync(kAll, fits)));
    if (first == static_cast<int32_t>(threadIdx.x) + 1) {
      const uint64_t tiles = (params.tokens * group + plan.rows - 1) / plan.rows;
      u.plan = plan, u.group = group, u.blocks = tiles * params.splits * params.kv_heads;
      u.index = blockIdx.x;
    }
  } else if (threadIdx.x == kWarp) {
    u.params = params;
    if (args.at[arg_state] != 0)
      abi::attention_follow(*pointer<const abi::KvState>(args.at[arg_state]), u.params);
  }
  if (threadIdx.x == 2 * kWarp) reinterpret_cast<BlockState*>(dynamic_shared())->args = args;
  __syncthreads();
  // A block has more than one unit only beyond 2^31 of them. In a loop, and with the index outside
  // shared memory, registers would have to be kept across the call.
  if (u.index >= u.blocks) return;
  if (threadIdx.x == 0) place_unit(u, args);
  __syncthreads();
  if (try_alone<kK, kV>(u)) {
    next_unit(u);
    if (u.index >= u.blocks) return;
  } else {
    __syncthreads();  // all have seen the unit before it is placed again
  }
  for (; u.index < u.blocks; next_unit(u)) {
    if (threadIdx.x == 0) place_unit(u, args);
    __syncthreads();
    attend<kK, kV>(u, args);
  }
}

}  // namespace gyre::cuda
