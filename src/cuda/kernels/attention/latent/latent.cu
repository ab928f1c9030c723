// Latent attention: all query heads share one row of a latent and a rotary part per token; the
// latent is K's first part and V. Three kernels: queries and the list of work, rows over splits of
// keys, and splits to outputs. Bytes moved: every key once for each 64 rows, and the states of the
// splits.
#include "cuda/kernels/attention/latent/layout.cuh"
#include "cuda/kernels/attention/latent/prepare.cuh"
#include "cuda/kernels/attention/latent/produce.cuh"
#include "cuda/kernels/attention/latent/reduce.cuh"
#include "cuda/kernels/attention/latent/scores.cuh"
#include "cuda/kernels/attention/latent/traits.cuh"
#include "cuda/kernels/attention/latent/values.cuh"

namespace gyre::cuda {

template <uint32_t kK, uint32_t kV, uint32_t kLatent, uint32_t kRotary, uint32_t kKeys, bool kBf16>
__global__ void __launch_bounds__(kLatentThreads)
    attention_latent_prepare(const abi::AttentionParams p, const Args args) {
  using T = LatentTraits<kK, kV, kLatent, kRotary, kKeys, kBf16>;
  pdl_wait();
  pdl_launch_dependents();
  const LatentScratch scratch = latent_scratch(p);
  if (blockIdx.x == 0) {
    list_work(p, args, scratch);
    return;
  }
  __shared__ float shared[kLatentWarps][kLatent];
  const uint32_t warp = threadIdx.x / kWarp;
  const uint64_t rows = p.tokens * p.heads;
  for (uint64_t row = uint64_t{blockIdx.x - 1} * kLatentWarps + warp; row < rows;
       row += uint64_t{gridDim.x - 1} * kLatentWarps)
    prepare_row<T>(p, args, scratch, row, shared[warp]);
}

// Loaded by words: as a struct behind a pointer it takes the compiler minutes.
inline LatentWork load_work(uint64_t from) {
  LatentWork work;
  auto* const words = reinterpret_cast<uint32_t*>(&work);
#pragma unroll
  for (uint32_t i = 0; i < sizeof(work) / 4; ++i) words[i] = load_bits(from, i, true);
  return work;
}

template <class T>
inline void init_latent_barriers(LatentState& state) {
  for (uint32_t i = 0; i < kLatentSlots; ++i) {
    init_barrier(&state.full[i], (T::kCopied ? 2 : 1) * kLatentGroup);
    init_barrier(&state.empty[i], 2 * kLatentGroup / kWarp * kWarpArrivals);
  }
  init_barrier(&state.weights_full, kLatentGroup / kWarp * kWarpArrivals);
  init_barrier(&state.weights_empty, 2 * kLatentGroup / kWarp * kWarpArrivals);
  for (uint32_t i = 0; i < 2; ++i)
    init_barrier(&state.done[i], kLatentGroup / kWarp * kWarpArrivals);
  for (uint32_t i = 0; i < kLatentSlots; ++i)
    state.leaves[i] = state.has_units[i][0] = state.has_units[i][1] = 0;
}

// The sums of the values need most registers. What a block has is fixed when it starts.
template <uint32_t kRegisters, bool kGrow>
inline void set_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (kGrow) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
#endif
}

template <uint32_t kK, uint32_t kV, uint32_t kLatent, uint32_t kRotary, uint32_t kKeys, bool kBf16>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attention_latent(const __grid_constant__ abi::AttentionParams p,
                     const __grid_constant__ Args args) {
  using T = LatentTraits<kK, kV, kLatent, kRotary, kKeys, kBf16>;
  LatentState& state = latent_state<T>();
  if (threadIdx.x == 0) init_latent_barriers<T>(state);
  const LatentScratch scratch = latent_scratch(p);
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
  const uint64_t list = args.at[arg_partial] + scratch.works;
  const uint32_t group = threadIdx.x / kLatentGroup;
  const auto each = [&](auto& role) {
    const uint32_t works = load_l2<uint32_t>(args.at[arg_partial]);
    uint32_t item = 0;
#pragma unroll 1
    for (uint32_t i = blockIdx.x; i < works; i += gridDim.x)
      role.run(load_work(list + i * sizeof(LatentWork)), item++);
  };
  if (group == 0) {
    set_registers<88, false>();
    LatentScores<T> role(p, args, scratch);
    each(role);
  } else if (group < 3) {
    set_registers<176, true>();
    LatentValues<T> role(p, args, scratch, group - 1);
    each(role);
  } else {
    set_registers<72, false>();
    LatentProducer<T> role(p, args);
    each(role);
  }
}

template <uint32_t kK, uint32_t kV, uint32_t kLatent, uint32_t kRotary, uint32_t kKeys, bool kBf16>
__global__ void __launch_bounds__(kLatentThreads)
    attention_latent_reduce(const abi::AttentionParams p, const Args args) {
  using T = LatentTraits<kK, kV, kLatent, kRotary, kKeys, kBf16>;
  pdl_wait();
  pdl_launch_dependents();
  const LatentScratch scratch = latent_scratch(p);
  const uint32_t tiles = pointer<const LatentCounts>(args.at[arg_partial])->tiles;
  const auto* const list = pointer<const LatentTile>(args.at[arg_partial] + scratch.tiles);
  // Several warps to a row that was cut into many splits.
  const uint32_t together = p.splits >= 64 ? kLatentWarps : (p.splits >= 16 ? 4 : 1);
  const uint32_t rows = kLatentWarps / together;
  LatentReducer<T> reducer(p, args, scratch, together);
  const uint64_t count = uint64_t{tiles} * kLatentRows;
  for (uint64_t i = uint64_t{blockIdx.x} * rows; i < count; i += uint64_t{gridDim.x} * rows) {
    const uint64_t row = i + threadIdx.x / kWarp / together;
    const LatentTile tile = list[row / kLatentRows];
    reducer.run(tile, static_cast<uint32_t>(row % kLatentRows));
  }
}

}  // namespace gyre::cuda
