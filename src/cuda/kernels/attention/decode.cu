// Attention of a few rows over many keys. A block is one KV head, up to 16 of its (token, query
// head) rows and one split of the keys. Every warp works alone on 16 to 64 keys at a time, from
// their load into its own ring of stages to its own partial sums; above head_dim 256 four warps
// share the keys. The warps meet once, at the end, to merge; then the blocks of a cluster merge
// through DSMEM, or the last block to write a row's partial merges all of them.
// Bytes moved: the split's K and V once, q, and head_dim + 2 floats per row and split or pair of
// splits. docs/attention.md draws a block.
#include "cuda/kernels/attention/kv_load.cuh"
#include "cuda/kernels/attention/reduce.cuh"

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

// Queries on their way from global memory to operands. A warp loads its first row, or two where it
// has more than one, before any key: a Q load queued behind a block's K and V takes microseconds.
template <class Traits>
class QueryLoads {
  static constexpr uint32_t kBlocks = Traits::kQueryBlocks;
  static constexpr uint32_t kAhead = Traits::kRows * kBlocks > Traits::kMostWarps ? 2 : 1;

 public:
  QueryLoads(const abi::AttentionParams& p, const DecodeProblem& problem, uint64_t q, uint32_t warp,
             uint32_t warps)
      : p_(p),
        problem_(problem),
        q_(q),
        warp_(warp),
        warps_(warps),
        is_f32_(p.q_dtype == 0 ? 1 : 0) {
    // The first address is pinned before pdl_wait. With two rows per warp registers are short.
    if constexpr (kAhead == 1) {
      const uint32_t r = warp / kBlocks;
      first_ = pin(address(r < problem.rows ? r : 0));
      is_f32_ = pin(is_f32_);
    }
  }
  const uint8_t* first() const { return first_; }

  void start() {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t r = (warp_ + i * warps_) / kBlocks;
      if (r < problem_.rows)
        load_query<Traits>(kAhead == 1 ? first_ : address(r), is_f32_ != 0, bits_[i]);
    }
  }

  // Rows to operands and factors, those of masks too.
  void finish(const Args& args, BlockState& state, unsigned char* shared) {
    auto* const staging = reinterpret_cast<float*>(shared + Traits::kLayout.staging);
    unsigned char* const operands = shared + Traits::kLayout.queries;
    const bool masks = !problem_.plain_logits || !problem_.uniform_mask;
    for (uint32_t i = warp_; i < Traits::kRows * kBlocks; i += warps_) {
      const uint32_t r = i / kBlocks, block = i % kBlocks;
      float* const row = staging + r * Traits::kDim;
      if (r < problem_.rows) {
        stage_query<Traits>(p_, problem_, bits_[0], block, row + block * (Traits::kDim / kBlocks),
                            state.factor[block * (Traits::kWarpsPerKey / kBlocks)][r]);
        load_next(i);
        if (masks && block == 0 && threadIdx.x % kWarp == 0)
          state.mask[r] = mask_row(problem_, args.at[arg_slopes], r);
        __syncwarp();
      }
      if constexpr (Traits::kLevelsK)
        write_query_columns<Traits>(r < problem_.rows ? row : nullptr, r, block,
                                    reinterpret_cast<uint2*>(operands), state.factor);
    }
    __syncthreads();
    if constexpr (!Traits::kLevelsK) {
      write_query_rows<Traits>(staging, problem_.rows, reinterpret_cast<uint4*>(operands));
      __syncthreads();
    }
  }

 private:
  const uint8_t* address(uint32_t r) const { return query_address(p_, problem_, q_, r); }
  void load_next(uint32_t i) {
#pragma unroll
    for (uint32_t e = 0; e < Traits::kDim / kWarp; ++e) bits_[0][e] = bits_[kAhead - 1][e];
    const uint32_t next = (i + kAhead * warps_) / kBlocks;
    if (next < problem_.rows) load_query<Traits>(address(next), is_f32_ != 0, bits_[kAhead - 1]);
  }

  const abi::AttentionParams& p_;
  const DecodeProblem& problem_;
  uint64_t q_;
  uint32_t warp_, warps_, is_f32_;
  const uint8_t* first_ = nullptr;
  uint32_t bits_[kAhead][Traits::kDim / kWarp];
};

// The last warp has the fewest queries: it computes where rows go.
template <class Traits>
inline void write_targets(const abi::AttentionParams& p, const DecodeProblem& problem,
                          const Args& args, BlockState& state) {
  const uint32_t r = threadIdx.x % kWarp;
  if (warp_index() + 1 == blockDim.x / kWarp && r < problem.rows)
    state.targets[r] = row_target<Traits>(p, problem, args, r);
}

template <class Traits>
using ValueSums = typename Choose<Traits::kLevelsV, LevelSums<Traits>, Float16Sums<Traits>>::type;

// What a warp holds while it walks the keys.
template <class Traits>
struct WarpLoop {
  const abi::AttentionParams& p;
  const DecodeProblem& problem;
  const BlockState& state;
  unsigned char* shared;
  uint32_t warp;
  Queries<Traits> queries;
  LevelTable table_k, table_v;
  LaneOffsets offsets;
  LaneWeights lane;
  uint32_t until_check = kStagesToCheck;
  bool masks;

  WarpLoop(const abi::AttentionParams& params, const DecodeProblem& of, const BlockState& block,
           unsigned char* memory, uint32_t index)
      : p(params),
        problem(of),
        state(block),
        shared(memory),
        warp(index),
        queries(memory + Traits::kLayout.queries, block.factor, index % Traits::kWarpsPerKey,
                of.rows),
        table_k(load_table<Traits::kK, Traits::kManyRows>(block.table_k)),
        table_v(Traits::kK == Traits::kV
                    ? table_k
                    : load_table<Traits::kV, Traits::kManyRows>(block.table_v)),
        offsets(lane_offsets<Traits>()),
        lane(lane_weights()),
        masks(!of.plain_logits || !of.uniform_mask) {}

  // Logits of a stage, in base 2, spread as the MMA over V wants them. `index` counts the warp's
  // stages, `begin` is the stage's first position.
  void logits(const unsigned char* stage, uint32_t index, uint32_t begin,
              typename SpreadV<Traits>::Scores& x) const {
    const ScoreExchange<Traits> exchange = {
        reinterpret_cast<float*>(shared + Traits::kLayout.exchange), index};
    if constexpr (Traits::kLevelsK == Traits::kLevelsV) {
      score<Traits>(table_k, queries, stage, offsets, exchange, x);
    } else {
      typename SpreadK<Traits>::Scores s;
      score<Traits>(table_k, queries, stage, offsets, exchange, s);
      constexpr DecodeSharedLayout kLayout = Traits::kLayout;
      transpose_scores<Traits>(
          s, reinterpret_cast<float*>(shared + kLayout.transpose + warp * kLayout.transpose_bytes),
          x);
    }
    if (masks || !problem.walk.whole(begin)) mask_scores<Traits>(p, problem, state.mask, begin, x);
  }

  void add(const unsigned char* stage, typename SpreadV<Traits>::Scores& x,
           LevelSums<Traits>& sums) {
    constexpr uint32_t kSlicesPerBlock = Traits::kWarpsPerKey / Traits::kBlocks;
    weigh_levels<Traits>(lane, x, stage + Traits::kStage.v_scales + offsets.scales,
                         warp % Traits::kWarpsPerKey / (kSlicesPerBlock != 0 ? kSlicesPerBlock : 1),
                         sums);
    lane.step(Traits::FormV::kBias != 0 ? Traits::kLaneKeys : 0);
    add_levels<Traits>(table_v, stage + offsets.v[0], stage + offsets.v[1], sums);
    if (--until_check == 0) {
      until_check = kStagesToCheck;
#pragma unroll
      for (uint32_t i = 0; i < sums.kFours; ++i) check_sums(lane, sums.row[i], sums.sums[i]);
    }
  }
  void add(const unsigned char* stage, typename SpreadV<Traits>::Scores& x,
           Float16Sums<Traits>& sums) {
    constexpr int32_t kHeadroom = Traits::kV == kFormatF16 ? 0 : 10;
#pragma unroll
    for (uint32_t i = 0; i < sums.kEights; ++i)
      weigh_float16<kHeadroom>(x[i], sums.row[i], sums.sums[i]);
    add_float16<Traits>(stage, x, sums);
  }
};

template <uint32_t kK, uint32_t kV, uint32_t kHeadDim, uint32_t kRows, uint32_t kCluster>
__global__ void GYRE_CLUSTER(kCluster)
    __launch_bounds__(decode_most_warps(kK, kV, kHeadDim, kRows, kCluster) * 32, 1)
        attention_decode(const abi::AttentionParams p, const Args args) {
  using Traits = DecodeTraits<kK, kV, kHeadDim, kRows, kCluster>;
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
  if constexpr (!Traits::kLevelsK || kRows > 4 || Traits::kMostWarps > 8) __syncthreads();
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

}  // namespace gyre::cuda
