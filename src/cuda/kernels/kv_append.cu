// kv_append: the keys and values of a step go to the sink tokens, or to body and tail, as the state
// in device memory says. Blocks of 256 threads: first tiles of the body (8 slots of one head, as in
// kv_quantize) of K, then of V, then rows for sink tokens and tail, 16 lanes each. The grid is made
// for the most tiles that a step can enter; blocks without any return at once. Every row is read
// once, plus once for tail or sink tokens.
#include "abi/kv_append.h"
#include "abi/kv_codec.h"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/tile.cuh"
#include "cuda/kernels/warp_tile.cuh"

namespace gyre::cuda {

// Addresses of a stream: source, codes, scales, sink tokens and tail.
__device__ inline const uint64_t* stream_args(const Args& args, uint32_t stream) {
  return args.at + 1 + 4 * stream;
}

// Tiles of one stream's body.
template <class Source>
struct AppendStream {
  const abi::KvAppendParams& p;
  const abi::KvAppendStream& s;
  const uint64_t* at;  // source, codes, scales
  const abi::AppendRun& run;
  uint64_t step_begin;  // key of the source's first token
  PlainRow<Source> row{nullptr, false};
  TilePlace place{};

  // The index-th tile, and slot `nth` of it.
  __device__ void find(uint32_t index, uint32_t nth) {
    const uint32_t heads = static_cast<uint32_t>(p.heads);
    const uint32_t number = index / heads, head = index - number * heads;
    const uint64_t tile = run.tile(number), slot = tile * abi::kKvTile + nth;
    const uint64_t key = run.key_of(slot, p.places.body_capacity);
    row.is_present = number < run.tiles && slot < p.places.body_capacity && key < run.end_key;
    const uint64_t token = row.is_present ? key - step_begin : 0;
    row.row =
        pointer<const Source>(at[0] + head * s.source_head_stride + token * s.source_token_stride);
    place.codes =
        pointer<uint8_t>(at[1] + head * s.body.codes_head_stride + tile * s.body.codes_tile_stride);
    place.scales = pointer<uint8_t>(at[2] + head * s.body.scales_head_stride +
                                    tile * s.body.scales_tile_stride);
  }

  template <uint32_t kFormat>
  __device__ void copy(const TileThread& me, uint32_t lanes) const {
    if (!row.present()) return;
    auto* const to = reinterpret_cast<typename DenseType<kFormat>::Type*>(
        place.codes + me.slot * (s.body.codes_tile_stride / abi::kKvTile));
    copy_row(row.row, to, s.body.head_dim, me.thread & (lanes - 1), lanes);
  }
};

template <class Source, uint32_t kFormat>
__device__ void append_tiles(const abi::KvAppendParams& p, const Args& args, uint32_t stream,
                             uint32_t block, TileShared& shared) {
  constexpr bool kCalibrated = abi::kv_is_native(kFormat) || abi::kv_is_mlx_native(kFormat);
  const abi::KvState state = *pointer<const abi::KvState>(args.at[0]);
  const abi::AppendRun run = abi::append_run(p, state);
  const abi::KvAppendStream& s = p.stream[stream];
  const uint32_t dim = s.body.head_dim;
  const uint32_t first = block * (dim == kWarpDim ? kBlockWarps : tiles_per_block(dim));
  if (first / static_cast<uint32_t>(p.heads) >= run.tiles) return;  // the same for the whole block
  AppendStream<Source> work{p, s, stream_args(args, stream), run, state.start};
  if constexpr (abi::kv_is_native(kFormat)) {
    const uint64_t source = work.at[0] | s.source_token_stride | s.source_head_stride;
    if (is_warp_tile(s.body, source, work.at[1], work.at[2])) {
      work.find(first + threadIdx.x / 32, WarpTile().slot);
      return quantize_warp_tile<kFormat>(shared, s.body, work.place, work.row);
    }
  }
  const uint32_t lanes = tile_lanes(dim);
  const TileThread me(lanes);
  for (uint32_t done = 0; done < tiles_per_block(dim); done += tiles_at_once(dim)) {
    if (done != 0) __syncthreads();
    work.find(first + done + me.tile, me.slot);
    if constexpr (kCalibrated) {
      quantize_tile<kFormat>(shared, s.body, work.place, work.row);
    } else {
      work.template copy<kFormat>(me, lanes);
    }
  }
}

// To sink tokens and tail; of a calibrated row its f16 part, bit for bit.
__device__ inline void copy_near(const CalibratedRow* from, Half* to, uint32_t head_dim) {
  copy_row(reinterpret_cast<const Half*>(from), to, head_dim, threadIdx.x % kNearLanes, kNearLanes);
}
template <class Source>
__device__ void copy_near(const Source* from, Half* to, uint32_t head_dim) {
  copy_row(from, to, head_dim, threadIdx.x % kNearLanes, kNearLanes);
}

template <class Source, uint32_t kCalibrated>
__device__ void append_near(const abi::KvAppendParams& p, const Args& args, uint64_t row) {
  const abi::KvKeys keys = abi::append_keys(p, *pointer<const abi::KvState>(args.at[0]));
  const uint64_t head = row % p.heads, token = row / p.heads % p.tokens;
  const uint64_t stream = row / p.heads / p.tokens, key = keys.begin + token;
  if (stream > 1 || key >= keys.end) return;
  const abi::KvAppendStream& s = p.stream[stream];
  const uint64_t* const at = stream_args(args, static_cast<uint32_t>(stream));
  const uint64_t to = abi::append_near_offset(p.places, s, key, head);
  if (to == abi::kNoNear) return;
  const uint64_t from = at[0] + head * s.source_head_stride + token * s.source_token_stride;
  if ((kCalibrated >> stream & 1) != 0) {
    copy_near(pointer<const CalibratedRow>(from), pointer<Half>(at[3] + to), s.body.head_dim);
  } else {
    copy_near(pointer<const Source>(from), pointer<Half>(at[3] + to), s.body.head_dim);
  }
}

// kCalibrated: as kv_quantize has it.
template <class Source, uint32_t kFormatK, uint32_t kFormatV, uint32_t kCalibrated = 0>
__global__ void __launch_bounds__(kBlockThreads)
    kv_append(const __grid_constant__ abi::KvAppendParams p, const __grid_constant__ Args args) {
  __shared__ TileShared shared;
  pdl_wait();
  pdl_launch_dependents();
  const auto blocks_k = static_cast<uint32_t>(append_body_blocks(p, 0));
  const uint32_t body_blocks = blocks_k + static_cast<uint32_t>(append_body_blocks(p, 1));
  const uint32_t stream = blockIdx.x < blocks_k ? 0 : 1;
  const uint32_t block = blockIdx.x - (stream == 0 ? 0 : blocks_k);
  if (blockIdx.x >= body_blocks) {
    append_near<Source, kCalibrated>(
        p, args,
        uint64_t{blockIdx.x - body_blocks} * (kBlockThreads / kNearLanes) +
            threadIdx.x / kNearLanes);
  } else if constexpr (kFormatK == kFormatV && kCalibrated == 0) {
    append_tiles<Source, kFormatK>(p, args, stream, block, shared);
  } else if (stream == 0) {
    append_tiles<SourceOf<Source, kCalibrated, 0>, kFormatK>(p, args, 0, block, shared);
  } else {
    append_tiles<SourceOf<Source, kCalibrated, 1>, kFormatV>(p, args, 1, block, shared);
  }
}

}  // namespace gyre::cuda
