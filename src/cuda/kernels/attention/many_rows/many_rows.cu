// out = softmax(scale q k^T, capped, biased, masked) v, or the partial state of a split, for many
// (token, query head) rows of a KV head: prompts, and drafts of several tokens. A block is one KV
// head, one split of the keys and 64 or 128 rows. Producer warps bring K and V, stage by stage, and
// unpack levels to 16-bit operands; consumer warpgroups of 64 rows multiply on tensor cores. For
// prompts a command ahead unpacks levels once for all blocks (unpack_keys.cuh).
// Bytes moved: the split's K and V once per block, q, and head_dim + 2 floats per row.
#include "cuda/kernels/attention/many_rows/consume.cuh"
#include "cuda/kernels/attention/many_rows/drafts.cuh"
#include "cuda/kernels/attention/many_rows/produce.cuh"
#include "cuda/kernels/attention/many_rows/produce_unpacked.cuh"
#include "cuda/kernels/attention/many_rows/queries.cuh"
#include "cuda/kernels/attention/many_rows/runs.cuh"
#include "cuda/kernels/attention/many_rows/unpack_keys.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

// Sets what all work tiles of a block share. One thread.
template <class T>
inline void start_block(ManyRowsState& state, const abi::AttentionParams& params,
                        const Args& args) {
  RowTile& tile = state.tile;
  const bool batch = params.table.page_tokens != 0;
  tile.params = params;
  tile.group = params.group;
  tile.invalid = 0;
  if (!batch && args.at[arg_state] != 0)
    abi::attention_follow(*pointer<const abi::KvState>(args.at[arg_state]), tile.params);
  const uint64_t rows = params.tokens * params.group;
  tile.tile_rows = T::kRows;
  tile.stage_keys = T::kKeys;
  tile.count = divide(rows + tile.tile_rows - 1, tile.tile_rows) * params.splits * params.kv_heads;
  tile.index = blockIdx.x;
  tile.entries = nullptr, tile.first_token = tile.base_tile = 0;
  tile.of_sequence = {};
  if (batch) tile.count = ~uint64_t{0};  // find_batch_tile counts them
  state.states = state.older = 0;
  state.table_k[0] = state.table_k[1] = level_table<T::kK, true>();
  state.table_v[0] = state.table_v[1] = level_table<T::kV, true>();
}

// The work tile's rows, keys and barriers. One thread.
template <class T>
inline void start_tile(ManyRowsState& state, const Args& args) {
  if (state.tile.paged()) {
    place_batch_tile(state.tile, args);
  } else {
    place_work_tile(state.tile, args);
  }
  if constexpr (T::kUnpacked) state.unpacked = unpacked_tiles_of(state.tile, args.at[arg_partial]);
  init_barriers<T>(state);
}

// The work tiles of a block, one after the other; all threads of a role, until no tile is left.
template <class T, bool kConsumers, class Role>
inline void for_each_tile(ManyRowsState& state, const Args& args, const Role& role) {
  constexpr BatchPart kPart = T::kUnpacked      ? BatchPart::unpacked
                              : T::kTakesOthers ? BatchPart::others
                                                : BatchPart::all;
  RowTile& tile = state.tile;
  if constexpr (T::kTakesRuns) {
    if (tile.params.schedule_key != 0) {
      for_each_run<T, kConsumers>(state, args, role);
      return;
    }
  }
  if (kPart != BatchPart::all && tile.paged() && tile.params.unpacked_room != 0) {
    const uint64_t end = find_unpacked_end(tile.params, args, T::kRows, T::kKeys, state.of_warps);
    if (threadIdx.x == 0) tile.unpacked_end = end;
    __syncthreads();
  }
  while (true) {
    if (tile.paged()) find_batch_tile<kPart>(tile, args, state.of_warps);
    if (tile.index >= tile.count) return;
    if (kConsumers && threadIdx.x == 0) start_tile<T>(state, args);
    __syncthreads();
    role();
    __syncthreads();
    if (kConsumers && threadIdx.x == 0) {
      tile.index += gridDim.x;
      end_barriers<T>(state);
    }
    __syncthreads();
  }
}

template <class T, bool kUnpacked = T::kUnpacked>
struct ProducerOf {
  using Type = Producer<T>;
};
template <class T>
struct ProducerOf<T, true> {
  using Type = UnpackedProducer<T>;
};

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim, uint32_t kGpu>
__global__ void __launch_bounds__(many_rows_layout(kK, kV, kKDim, kVDim, kGpu).threads(),
                                  many_rows_layout(kK, kV, kKDim, kVDim, kGpu).blocks)
    attention_many_rows(const abi::AttentionParams params, const Args args) {
  using T = ManyRows<kK, kV, kKDim, kVDim, kGpu>;
  pdl_wait();
  pdl_launch_dependents();
  ManyRowsState& state = block_state();
  if (threadIdx.x == 0) start_block<T>(state, params, args);
  __syncthreads();
  const uint32_t group = threadIdx.x / kGroupThreads;
  if (group == T::kGroups) {
    leave_registers<T>();
    for_each_tile<T, false>(state, args, [&] { typename ProducerOf<T>::Type(state).run(); });
  } else {
    take_registers<T>();
    for_each_tile<T, true>(state, args, [&] {
      load_tile_queries<T>(state, args.at[arg_q]);
      sync_role<kConsumerRole, T::kGroups * kGroupThreads>(state, 0);
      Consumer<T> consumer(state, args, group);
      consumer.run();
      consumer.write(args);
    });
  }
}

}  // namespace gyre::cuda
