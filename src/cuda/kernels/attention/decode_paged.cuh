#pragma once
// Attention of a few rows of each of several sequences, whose keys lie in pages. A block for each
// multiprocessor takes an equal run of the batch's work (paged_work.cuh), item by item: one piece
// of the keys of one sequence and KV head, for up to 16 rows. Within an item warps work as in
// decode.cu. Their loads run ahead into the next items, so that memory is busy while they merge.
// Bytes moved: K and V once, q, and head_dim + 2 floats for each row and piece of a unit that does
// not lie in one block.
#include "cuda/kernels/attention/decode_loop.cuh"
#include "cuda/kernels/attention/paged_load.cuh"
#include "cuda/kernels/attention/paged_reduce.cuh"

namespace gyre::cuda {

// The unit's rows, as far as queries and masks are concerned.
inline DecodeProblem paged_unit(const abi::AttentionParams& p, const Args& args,
                                const PagedItem& item) {
  DecodeProblem problem = {};
  problem.kv_head = item.kv_head, problem.group = p.group;
  problem.first_row = item.first_row, problem.rows = item.rows;
  problem.mask = item.mask;
  problem.first = item.origin;
  const uint32_t last_row = item.first_row + item.rows - 1;
  problem.uniform_mask = item.first_row / p.group == last_row / p.group;
  problem.plain_logits = p.soft_cap == 0 && args.at[arg_slopes] == 0;
  return problem;
}
inline DecodeProblem paged_problem(const abi::AttentionParams& p, const Args& args,
                                   const PagedItem& item, uint32_t stage_keys) {
  DecodeProblem problem = paged_unit(p, args, item);
  problem.uniform_mask = item.uniform != 0;
  problem.walk = paged_walk(item, stage_keys);
  problem.walk_first = item.base + item.skip - item.origin;
  return problem;
}

// Everything of a block that outlives an item.
template <class Traits>
struct PagedBlock {
  const abi::AttentionParams& p;
  const Args& args;
  unsigned char* shared;
  BlockState& state;
  PagedState& paged;
  uint32_t warp, warps;
  uint32_t at = 0, before = (Traits::kStages - 1) * Traits::kLayout.stage;  // stages of the ring
  uint32_t index = 0;                                                       // counts rounds

  unsigned char* ring() const { return shared + Traits::kLayout.ring + warp * Traits::kRingBytes; }
  bool is_last_warp() const { return warp + 1 == warps; }
  uint64_t queries_of(const PagedItem& item) const {
    return args.at[arg_q] + item.first_token * p.q_token_stride;
  }
  void write_targets(const PagedItem& item) const {
    const uint32_t r = threadIdx.x % kWarp;
    if (is_last_warp() && r < item.rows)
      state.targets[r] = paged_row_target<Traits>(p, item, args, r);
  }

  // Keys of an item: QK, softmax, PV, one stage after the other. Warps go through the ring in step.
  void walk(const DecodeProblem& problem, uint32_t rounds, PagedLoads<Traits>& loads,
            WarpLoop<Traits>& loop, ValueSums<Traits>& sums) {
    constexpr uint32_t kStageBytes = Traits::kLayout.stage, kPerKey = Traits::kWarpsPerKey;
#pragma unroll 1
    for (uint32_t round = 0; round < rounds; ++round) {
      wait_for_stage<Traits::kStages>();
      loads.issue(ring() + before);
      const unsigned char* const bytes = ring() + at;
      before = at;
      at = at + kStageBytes == Traits::kStages * kStageBytes ? 0 : at + kStageBytes;
      const uint32_t stage = round * (warps / kPerKey) + warp / kPerKey;
      if (stage * Traits::kTiles < problem.walk.tiles) {
        typename SpreadV<Traits>::Scores x;
        loop.logits(bytes, index, stage * Traits::kStage.keys, x);
        loop.add(bytes, x, sums);
      } else if constexpr (kPerKey > 1) {
        sync_named_barrier<kPerKey>(warp / kPerKey);  // racecheck counts barriers per thread
      }
      ++index;
    }
  }

  // Where warps leave their sums: behind the ring, or in the stage that was used last.
  float* sums_of(uint32_t of_warp) const {
    constexpr DecodeSharedLayout kLayout = Traits::kLayout;
    const uint32_t place = kLayout.sums_apart() ? Traits::kStages * kLayout.stage : before;
    return reinterpret_cast<float*>(shared + kLayout.ring + of_warp * Traits::kRingBytes + place);
  }
  // Warps that had keys; one at least.
  uint32_t busy_warps(const PagedItem& item) const {
    constexpr uint32_t kPerKey = Traits::kWarpsPerKey, kKeys = Traits::kStage.keys;
    const uint32_t stages = item.count == 0 ? 0 : (item.skip + item.count + kKeys - 1) / kKeys;
    const uint32_t step = warps / kPerKey;
    return (stages < step ? (stages == 0 ? 1 : stages) : step) * kPerKey;
  }

  // The sums of a piece, and what becomes of them.
  void finish(uint32_t i, const LaneWeights& lane, const ValueSums<Traits>& sums,
              PagedWork<Traits>& work) {
    const PagedItem &item = paged.item(i), &next = paged.item(i + 1);
    __syncwarp();  // orders the other lanes' reads of the last stage before the sums
    const uint32_t busy = busy_warps(item);
    if (warp < busy) write_warp<Traits>(state, sums_of(warp), lane, sums);
    __syncthreads();
    PagedReduce<Traits>(p, args, state, paged, shared)
        .run(item, sums_of(0), busy, next.end != 0 || next.new_unit != 0);
    if (is_last_warp()) work.produce(i + kItemsAhead);
    __syncthreads();
  }
  void attend(uint32_t i, PagedLoads<Traits>& loads, PagedWork<Traits>& work) {
    const PagedItem& item = paged.item(i);
    const DecodeProblem problem = paged_problem(p, args, item, Traits::kStage.keys);
    WarpLoop<Traits> loop(p, problem, state, shared, warp);
    ValueSums<Traits> sums = ValueSums<Traits>::none();
    walk(problem, item.rounds, loads, loop, sums);
    finish(i, loop.lane, sums, work);
  }

  // One item, and the queries of the next one if that begins a unit. They wait for it in registers,
  // where there are enough.
  void run(uint32_t i, PagedLoads<Traits>& loads, PagedWork<Traits>& work) {
    if constexpr (Traits::kFewRegisters) attend(i, loads, work);
    const PagedItem& next = paged.item(i + 1);
    const bool renews = next.end == 0 && next.new_unit != 0;
    const PagedItem& of = renews ? next : paged.item(i);
    const DecodeProblem unit = paged_unit(p, args, of);
    QueryLoads<Traits> queries(p, unit, queries_of(of), warp, warps);
    if (renews) queries.start();
    if constexpr (!Traits::kFewRegisters) attend(i, loads, work);
    if (!renews) return;
    write_targets(next);
    queries.finish(args, state, shared);
  }
};

template <uint32_t kK, uint32_t kV, uint32_t kHeadDim, uint32_t kRows,
          uint32_t kHeadDimV = kHeadDim>
__global__ void __launch_bounds__(
    decode_most_warps(kK, kV, HeadDims(kHeadDim, kHeadDimV), kRows, kDecodePages) * 32,
    decode_shared_layout(kK, kV, HeadDims(kHeadDim, kHeadDimV), kRows, kDecodePages).side_by_side)
    attention_decode_paged(const abi::AttentionParams p, const Args args) {
  using Traits = DecodeTraits<kK, kV, kHeadDim, kRows, kDecodePages, kHeadDimV>;
  unsigned char* const shared = dynamic_shared();
  auto& state = *reinterpret_cast<BlockState*>(shared);
  auto& paged = *reinterpret_cast<PagedState*>(shared + kDecodeStateBytes);
  PagedBlock<Traits> block = {p, args, shared, state, paged, warp_index(), blockDim.x / kWarp};
  if (threadIdx.x == 0) {
    state.table_k[0] = state.table_k[1] = level_table<kK, Traits::kManyRows>();
    state.table_v[0] = state.table_v[1] = level_table<kV, Traits::kManyRows>();
  }
  pdl_wait();

  // Work: the block's share, and its first items.
  PagedWork<Traits> work(p, args, paged);
  if (!work.start()) return;
  if (block.is_last_warp()) {
    work.seek();
    work.produce(0);
  }
  __syncthreads();
  const PagedItem& first = paged.item(0);
  if (first.end != 0) return;

  // Loads: Q, then the first stages of K and V.
  const DecodeProblem unit = paged_unit(p, args, first);
  QueryLoads<Traits> queries(p, unit, block.queries_of(first), block.warp, block.warps);
  queries.start();
  PagedLoads<Traits> loads(p, args, paged, block.warp);
  loads.look_up();
  // Loads run into the next items; later ones are described while these are worked on.
  if (block.is_last_warp())
    for (uint32_t i = 1; i < Traits::kStages; ++i) work.produce(i);
  __syncthreads();
  for (uint32_t i = 0; i + 1 < Traits::kStages; ++i)
    loads.issue(block.ring() + i * Traits::kLayout.stage);
  if (block.is_last_warp())
    for (uint32_t i = Traits::kStages; i < kItemsAhead; ++i) work.produce(i);
  block.write_targets(first);
  queries.finish(args, state, shared);

  for (uint32_t i = 0; paged.item(i).end == 0; ++i) block.run(i, loads, work);
  pdl_launch_dependents();
}

}  // namespace gyre::cuda
