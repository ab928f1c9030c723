// Attention of a few rows over many keys. A block is one KV head, up to 16 of its (token, query
// head) rows and one split of the keys. Every warp works alone on 16 to 64 keys at a time, from
// their load into its own ring of stages to its own partial sums; above head_dim 256 four warps
// share the keys. The warps meet once, at the end, to merge; then the blocks of a cluster merge
// through DSMEM, or the last block to write a row's partial merges all of them.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats per row and split or pair of
// splits. docs/attention.md draws a block.
#include "cuda/kernels/attention/decode/block_state.cuh"
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/attention/decode/decode_loop.cuh"
#include "cuda/kernels/attention/decode/decode_paged.cuh"
#include "cuda/kernels/attention/decode/kv_load.cuh"
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/reduce.cuh"
#include "cuda/kernels/attention/decode/row_target.cuh"

namespace gyre::cuda {

// The stages of a warp: which of the split's it takes, and where they lie.
template <class Traits>
struct WarpStages {
  uint32_t first, step, count;  // stages first, first + step, ... below count
  unsigned char* ring;

  WarpStages(const DecodeProblem& problem, unsigned char* shared, uint32_t warp, uint32_t warps)
      : first(warp / Traits::kWarpsPerKey),
        step(warps / Traits::kWarpsPerKey),
        count((problem.walk.tiles + Traits::kTiles - 1) / Traits::kTiles),
        ring(shared + Traits::kLayout.ring + warp * Traits::kRingBytes) {}

  // Stages of a warp that takes `from`, from + step, ...
  uint32_t rounds(uint32_t from) const {
    return from < count ? (count - from + step - 1) / step : 0;
  }
  // Warps that have keys; one at least.
  uint32_t busy_warps() const {
    return (count < step ? (count == 0 ? 1 : count) : step) * Traits::kWarpsPerKey;
  }
};

// Groups of warps that share keys pass their named barrier once per stage. Those with a stage less
// pass it once more: racecheck counts barriers per thread and would see no order between groups.
template <class Traits>
inline void even_out_barriers(const WarpStages<Traits>& stages) {
  if constexpr (Traits::kWarpsPerKey > 1) {
    if (stages.rounds(stages.first) < stages.rounds(0))
      sync_named_barrier<Traits::kWarpsPerKey>(stages.first);
  }
}

// The last warp has the fewest queries: it computes where rows go.
template <class Traits>
inline void write_targets(const abi::AttentionParams& p, const DecodeProblem& problem,
                          const Args& args, BlockState& state) {
  const uint32_t r = threadIdx.x % kWarp;
  if (warp_index() + 1 == blockDim.x / kWarp && r < problem.rows)
    state.targets[r] = row_target<Traits>(p, problem, args, r);
}

template <uint32_t kK, uint32_t kV, uint32_t kHeadDim, uint32_t kRows, uint32_t kCluster,
          uint32_t kHeadDimV = kHeadDim>
__global__ void GYRE_CLUSTER(kCluster)
    __launch_bounds__(decode_max_warps(kK, kV, HeadDims(kHeadDim, kHeadDimV), kRows, kCluster) * 32,
                      1) attention_decode(const abi::AttentionParams p, const Args args) {
  using Traits = DecodeTraits<kK, kV, kHeadDim, kRows, kCluster, kHeadDimV>;
  constexpr uint32_t kStages = Traits::kStages, kStageBytes = Traits::kLayout.stage;
  unsigned char* const shared = dynamic_shared();
  auto& state = *reinterpret_cast<BlockState*>(shared);
  const uint32_t warp = warp_index(), warps = blockDim.x / kWarp;

  // Problem: rows, keys, addresses.
  DecodeProblem problem = decode_rows(p, kRows);
  decode_keys_of_split(p, args, Traits::kStage.keys, problem);
  const StageLoad<Traits> load(p, args, problem.kv_head, warp % Traits::kWarpsPerKey);
  const WarpStages<Traits> stages(problem, shared, warp, warps);
  QueryLoads<Traits> query_loads(p, problem, args.at[arg_q], warp, warps);
  // The blocks of a cluster of eight have time before pdl_wait; others may have started late.
  if constexpr (kCluster == kDecodeCluster) write_targets<Traits>(p, problem, args, state);
  // Always false: it forces the compiler to compute addresses before griddepcontrol.wait. It would
  // defer them, and parameters are slow to read again after the wait. With many rows of levels
  // registers are too short to hold them.
  if constexpr (kRows == 4 || !Traits::kLevelsK) {
    const uint32_t bits =
        load.never_set() | never_set(problem.walk) | never_set<2>(query_loads.first());
    if (bits != 0) trap();
  }
  pdl_wait();
  // A split without keys; the blocks of a cluster leave together.
  if (p.partial != abi::kAttentionPartial && blockIdx.x / kCluster >= problem.clusters<kCluster>())
    return;

  // Loads: Q, then the first stages of K and V. Without the barrier four Q loads at most queue
  // behind the stages of eight warps.
  query_loads.start();
  if constexpr (!Traits::kLevelsK || kRows > 4 || Traits::kMaxWarps > 8) __syncthreads();
  for (uint32_t i = 0; i + 1 < kStages; ++i)
    load.start(problem.walk, stages.first + i * stages.step, stages.ring + i * kStageBytes);

  // Queries to operands.
  if (threadIdx.x == 0) {
    state.table_k[0] = state.table_k[1] = level_table<kK, Traits::kManyRows>();
    state.table_v[0] = state.table_v[1] = level_table<kV, Traits::kManyRows>();
    if constexpr (kCluster > 1)
      expect_transactions(&state.transactions, BlockReduce<Traits>::transaction_bytes(problem));
  }
  if constexpr (kCluster < kDecodeCluster) write_targets<Traits>(p, problem, args, state);
  query_loads.finish(args, state, shared);
  if constexpr (kCluster > 1) cluster_arrive();  // other blocks may store into the staging buffer

  // Keys: QK, softmax, PV, one stage after the other.
  WarpLoop<Traits> loop(p, problem, state, shared, warp);
  ValueSums<Traits> sums = ValueSums<Traits>::none();
  uint32_t at = 0, before = (kStages - 1) * kStageBytes, index = 0;
#pragma unroll 1
  for (uint32_t stage = stages.first; stage < stages.count; stage += stages.step) {
    wait_for_stage<kStages>();
    load.start(problem.walk, stage + (kStages - 1) * stages.step, stages.ring + before);
    const unsigned char* const bytes = stages.ring + at;
    before = at;
    at = at + kStageBytes == kStages * kStageBytes ? 0 : at + kStageBytes;
    typename SpreadV<Traits>::Scores x;
    loop.logits(bytes, index++, stage * Traits::kStage.keys, x);
    loop.add(bytes, x, sums);
  }

  even_out_barriers(stages);

  // Merge. The barrier orders the other lanes' reads of the last stage before the partial sums,
  // which overwrite it.
  pdl_launch_dependents();
  copy_wait<0>();
  __syncwarp();
  const uint32_t busy = stages.busy_warps();
  if (warp < busy)
    write_warp<Traits>(state, reinterpret_cast<float*>(stages.ring), loop.lane, sums);
  BlockReduce<Traits>(problem, state, shared, busy).run(p.partial);
}

template <uint32_t kK, uint32_t kV, uint32_t kHeadDim, uint32_t kRows, bool kOnePage,
          uint32_t kHeadDimV = kHeadDim>
__global__ void __launch_bounds__(
    paged_layout(kK, kV, HeadDims(kHeadDim, kHeadDimV), kRows).max_warps * 32, 1)
    attention_decode_paged(const abi::AttentionParams p, const Args args, const EarlyBits early) {
  using Traits = DecodeTraits<kK, kV, kHeadDim, kRows, kDecodePages, kHeadDimV>;
  PagedBlock<Traits, kOnePage>(p, args, early, dynamic_shared()).run();
}

}  // namespace gyre::cuda
