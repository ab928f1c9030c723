#pragma once
// Attention of up to 64 rows of a KV head over levels in pages: draft tokens, a prompt's last
// tokens. Blocks take their runs from the step schedule (abi/attention_schedule.h). Producer warps
// copy and unpack K and V to int8 operands, consumer warpgroups multiply them by queries and
// weights of 16-bit integers on tensor cores. Bytes moved: K and V once for each work item, q, and
// head_dim + 2 floats for each row and group of a work item in several blocks.
#include "cuda/kernels/attention/many_rows/drafts_consume.cuh"
#include "cuda/kernels/attention/many_rows/drafts_produce.cuh"

namespace gyre::cuda {

template <class T>
inline void init_draft_barriers(DraftsState& state) {
  for (PhaseBarrier& barrier : state.described) init_barrier(&barrier, kWarpArrivals);
  for (uint32_t i = 0; i < T::kLayout.slots; ++i) {
    init_barrier(&state.full[i], kProducers);
    init_barrier(&state.empty[i], T::kConsumers / kWarp * kWarpArrivals);
  }
  for (PhaseBarrier& barrier : state.loaded) init_barrier(&barrier, kProducers / kWarp);
  fence_operands();  // copies complete barriers
}

// For the producers together.
template <class T>
inline void begin_drafts(DraftsState& state, const abi::AttentionParams& p, const Args& args) {
  if (threadIdx.x == T::kConsumers) init_draft_barriers<T>(state);
  if (threadIdx.x == T::kConsumers + kWarp) state.call = p;
  if (threadIdx.x == T::kConsumers + 2 * kWarp) state.args = args;
  if (threadIdx.x == T::kConsumers + 3 * kWarp) {
    state.table_k[0] = state.table_k[1] = level_table<T::kK, true>();
    state.table_v[0] = state.table_v[1] = level_table<T::kV, true>();
  }
}

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim, uint32_t kGroups>
__global__ void __launch_bounds__(drafts_layout(kK, kV, kKDim, kVDim, kGroups).threads(),
                                  drafts_layout(kK, kV, kKDim, kVDim, kGroups).blocks)
    attention_drafts(const abi::AttentionParams p, const Args args) {
  using T = Drafts<kK, kV, kKDim, kVDim, kGroups>;
  DraftsState& state = drafts_state();
  const bool produces = threadIdx.x >= T::kConsumers;
  if (produces) begin_drafts<T>(state, p, args);
  __syncthreads();
  pdl_wait();
  if (produces) {
    DraftRegisters<T>::leave();
    pdl_launch_dependents();
    DraftProducer<T>(state).run();
  } else {
    DraftRegisters<T>::take();
    DraftConsumer<T>(state).run();
  }
}

}  // namespace gyre::cuda
