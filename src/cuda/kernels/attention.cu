// out = softmax(scale q k^T, capped, biased, masked) v, or the partial state of a split.
// A block is one KV head, one split of the keys and up to 16 of the head's (token, query head)
// rows. It walks the split in chunks of 64 keys (fewer where rows are long): bytes come to shared
// memory asynchronously, each is read from memory once; then 16 keys to a warp are scored, a warp
// to a row makes weights, and every warp adds up its own 16-wide tiles of V's coordinates.
// Products run on tensor cores: int8 levels times 16-bit queries (K), f16 levels times f16 weights
// (V), f16 and bf16 in two parts where one is not exact enough; f32 and compat in f32.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats a row.
// Decoding has a kernel of its own, attention_decode.cu.
#include "attention_keys.cuh"
#include "attention_values.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

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

// Formats known to the compiler.
inline abi::KvCacheLayout with_format(abi::KvCacheLayout layout, uint32_t format) {
  layout.format = format;
  return layout;
}

template <uint32_t kK, uint32_t kV>
__global__ void __launch_bounds__(512, 1)
    attention(const abi::AttentionParams params, const Args args) {
  await_turn();
  pass_turn();
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
  __syncthreads();
  for (; u.index < u.blocks; next_unit(u)) {
    if (threadIdx.x == 0) place_unit(u, args);
    __syncthreads();
    attend<kK, kV>(u, args);
  }
}

}  // namespace gyre::cuda
