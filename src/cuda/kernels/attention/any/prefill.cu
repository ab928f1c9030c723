// out = softmax(scale q k^T, capped, biased, masked) v, or the partial state of a split, for any
// number of rows, head dims and formats. A block is one KV head, one split of the keys and up to 16
// of the head's (token, query head) rows. It walks the split in stages of 64 keys (fewer where rows
// are long): bytes come to shared memory asynchronously, each read once; then every warp scores 16
// keys, one warp per row makes weights, and every warp sums up its own 16-wide tiles of V's
// coordinates. MMAs: int8 levels by 16-bit queries (K), f16 levels by f16 weights (V), f16 and bf16
// with hi and lo parts where one is not exact enough; f32 and mlx-native's formats in f32.
// Bytes moved: the split's K and V once per 16 rows, q, and head_dim + 2 floats per row.
#include "cuda/kernels/attention/any/prefill_layout.cuh"
#include "cuda/kernels/attention/any/prefill_load.cuh"
#include "cuda/kernels/attention/any/prefill_problem.cuh"
#include "cuda/kernels/attention/any/prefill_pv.cuh"
#include "cuda/kernels/attention/any/prefill_qk.cuh"
#include "cuda/kernels/attention/any/prefill_softmax.cuh"
#include "cuda/kernels/attention/common/row_output.cuh"
#include "cuda/kernels/attention/common/row_tile_batch.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

// Sums from registers to rows in shared memory, out of the rotated domain, to the output.
template <uint32_t kV>
inline void write_rows(const PrefillProblem& problem, const Args& args,
                       const float (&acc)[kMaxTiles][2][4]) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
                 n = problem.params.v.head_dim;
  __syncthreads();  // the staging buffer may share memory with the stages
#pragma unroll
  for (uint32_t tile = 0; tile < kMaxTiles; ++tile) {
    const uint32_t column = (tile * problem.layout.warps + warp) * 16 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t row = i / 4 * 8 + lane % 4 * 2 + i % 2, c = column + i / 2 % 2 * 8;
      if (c < n && row < problem.rows) problem.staging()[row * n + c] = acc[tile][i / 4][i % 4];
    }
  }
  __syncthreads();
  for (uint32_t r = warp; r < problem.rows; r += problem.layout.warps) {
    restore<kV>(problem.staging() + r * n, n);
    const RowWriter writer(problem, args, r, problem.state().state[r], lane == 0);
    for (uint32_t c = lane; c < n; c += kWarp) writer.put(c, problem.staging()[r * n + c]);
  }
}

template <uint32_t kK, uint32_t kV>
inline void attend(const PrefillProblem& problem, const Args& args) {
  const uint32_t stages = problem.stage_count();
  const uint32_t ahead = problem.layout.stages - 1;  // 0: a stage is loaded when it is needed
  if (problem.layout.early_keys != 0) {
    for (uint32_t i = 0; i < ahead; ++i) load_stage<kK, kV>(problem, i);
  }
  start_rows(problem, pointer<const float>(args.at[arg_alibi_slopes]));
  clear_weights(problem);
  load_queries<kK>(problem, args.at[arg_q]);
  __syncthreads();
  make_fragments<kK>(problem, problem.params.k.head_dim);
  if (problem.layout.early_keys == 0) {
    __syncthreads();
    for (uint32_t i = 0; i < ahead; ++i) load_stage<kK, kV>(problem, i);
  }
  float acc[kMaxTiles][2][4] = {};
  for (uint32_t stage = 0; stage < stages; ++stage) {
    if (ahead == 0) {
      __syncthreads();
      load_stage<kK, kV>(problem, stage);
    }
    wait_for_load(problem.layout.stages);
    __syncthreads();  // the stage is there, and nobody uses the one before it
    if (ahead != 0) load_stage<kK, kV>(problem, stage + ahead);
    score_stage<kK>(problem, stage);
    if (threadIdx.x == 0) problem.state().hidden = 0;
    __syncthreads();
    for (uint32_t r = threadIdx.x / kWarp; r < problem.rows; r += problem.layout.warps)
      merge_stage<kV>(problem, stage, r, pointer<const uint8_t>(args.at[arg_tree_mask]));
    __syncthreads();
    add_values<kV>(problem, stage, acc);
  }
  write_rows<kV>(problem, args, acc);
}

// With formats that the compiler knows.
inline abi::KvCacheLayout with_format(abi::KvCacheLayout layout, uint32_t format) {
  layout.format = format;
  return layout;
}

template <uint32_t kK, uint32_t kV>
__global__ void __launch_bounds__(512, 1)
    attention_prefill(const abi::AttentionParams params, const Args args) {
  pdl_wait();
  pdl_launch_dependents();
  PrefillProblem& problem = PrefillProblem::of_block();
  if (threadIdx.x / kWarp == 0) {
    // A candidate per lane: one after the other would take longer than the first keys.
    const abi::KvCacheLayout k = with_format(params.k, kK), v = with_format(params.v, kV);
    const uint64_t group = params.group;
    const PrefillLayout layout = prefill_layout(k, v, prefill_rows(params), threadIdx.x);
    const bool fits = threadIdx.x < kPrefillLayouts && layout.total <= dynamic_shared_bytes();
    const int32_t first = __ffs(static_cast<int32_t>(__ballot_sync(kAll, fits)));
    if (first == static_cast<int32_t>(threadIdx.x) + 1) {
      const uint64_t tiles = (params.tokens * group + layout.rows - 1) / layout.rows;
      problem.layout = layout, problem.group = group;
      problem.tile_rows = layout.rows, problem.stage_keys = layout.stage_keys;
      problem.count = tiles * params.splits * params.kv_heads;
      problem.index = blockIdx.x;
      if (params.table.page_tokens != 0) problem.count = ~uint64_t{0};  // find_batch_tile counts
      problem.entries = nullptr, problem.first_token = problem.base_tile = 0;
      problem.of_sequence = {};
    }
  } else if (threadIdx.x == kWarp) {
    problem.params = params;
    problem.invalid = 0;
    if (args.at[arg_state] != 0 && params.table.page_tokens == 0)
      abi::attention_follow(*pointer<const abi::KvState>(args.at[arg_state]), problem.params);
  }
  __syncthreads();
  const bool batch = params.table.page_tokens != 0;
  // Nobody's between tiles.
  auto* const of_warps = reinterpret_cast<uint64_t*>(problem.state().begin);
  static_assert(sizeof(Rows::begin) >= 16 * sizeof(uint64_t));
  if (batch) find_batch_tile(problem, args, of_warps);
  while (problem.index < problem.count) {
    if (threadIdx.x == 0) {
      if (batch) {
        place_batch_tile(problem, args);
      } else {
        place_work_tile(problem, args);
      }
    }
    __syncthreads();
    attend<kK, kV>(problem, args);
    __syncthreads();
    if (threadIdx.x == 0) problem.index += gridDim.x;
    __syncthreads();
    if (batch) find_batch_tile(problem, args, of_warps);
  }
}

}  // namespace gyre::cuda
