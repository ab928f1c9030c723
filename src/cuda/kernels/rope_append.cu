// rope_append for few tokens: rotates q, rotates and stores k, stores v, in one launch. Time is
// latency: rows are spread over lanes and blocks, and loads are on their way before they are
// needed. Blocks of 256 threads take 8 rows of K or of V, by 4 to 32 lanes each, or a part of q as
// rope does. Rotated rows of K lie in shared memory, in the dtype that rope would leave them in,
// and are then stored as any others are. Every byte of q, k and v is read once (with the norm
// twice).
#include "abi/rope_append.h"
#include "cuda/kernels/rotated_rows.cuh"
#include "cuda/kernels/store_rows.cuh"

namespace gyre::cuda {

constexpr uint32_t kWhereArg = 7;
__device__ inline const uint64_t* side_args(const Args& args, uint32_t stream) {
  return args.at + kWhereArg + 1 + 4 * stream;  // source, codes, scales, sinks and tail
}

// Strides of a source, and where its cache has its rows.
struct SideLayout {
  uint64_t token_stride, head_stride;
  const abi::KvCacheLayout& cache;
};
template <class Where>
__device__ SideLayout side_layout(const abi::RopeAppendParams& p, uint32_t stream) {
  if constexpr (is_same_type<Where, abi::KvState>) {
    const abi::KvAppendStream& s = p.append.stream[stream];
    return {s.source_token_stride, s.source_head_stride, s.body};
  } else {
    const abi::KvQuantizeStream& s = p.write.stream[stream];
    return {s.source_token_stride, s.source_head_stride, s.cache};
  }
}

// V.
struct NoRotation {
  static constexpr bool kRotates = false;
};

template <class In, uint32_t kFormat, class Where, class Rotation>
__device__ void row_block(const abi::RopeAppendParams& p, const Args& args, uint32_t stream,
                          uint32_t block, const Rotation& rotation, TileShared& shared) {
  const SideLayout side = side_layout<Where>(p, stream);
  const abi::KvCacheLayout& cache = side.cache;
  const uint64_t* const at = side_args(args, stream);
  const uint32_t lanes = stored_lanes(cache.head_dim, abi::kv_is_compat(kFormat));
  const uint32_t nth = threadIdx.x / lanes, lane = threadIdx.x & (lanes - 1);
  if (nth >= kStoredRows) return;  // whole warps
  const uint32_t index = block * kStoredRows + nth;
  const auto heads = static_cast<uint32_t>(p.rope.stream[1].heads);
  const uint32_t token = index / heads, head = index - token * heads;
  const bool exists = token < p.rope.tokens;
  const uint64_t x = at[0] + (exists ? token : 0) * side.token_stride + head * side.head_stride;
  const typename FewOf<Where>::Type where(p, args.at[kWhereArg]);
  const In* row = pointer<const In>(x);
  if constexpr (Rotation::kRotates) {
    rotation.rotate_rows({exists ? x : 0, token}, lanes);
    row = rotation.row(nth);
  } else {
    prefetch(row + lane * (cache.head_dim / lanes));
  }
  const RowTarget to = where.target(p, stream, at, token, head, exists);
  if (cache.role == kRoleV && to.stored) {
    for (uint32_t i = lane; i * 128 < cache.codes_tile_stride; i += lanes)
      prefetch(to.tile.codes + i * 128);
  }
  store_row<kFormat>(cache, to, row, lanes, p.rope.tokens > 1, shared);
}

template <class In, uint32_t kFormatK, uint32_t kFormatV, bool kAdjacent, bool kNorm, class Where>
__global__ void __launch_bounds__(kBlockThreads)
    rope_append(const __grid_constant__ abi::RopeAppendParams p,
                const __grid_constant__ Args args) {
  __shared__ TileShared shared;
  pdl_wait();
  pdl_launch_dependents();
  const RopeAppendBlocks blocks(p, sizeof(In));
  const uint32_t block = blockIdx.x;
  if (block < blocks.rows) {
    const KeyRotation<In, kAdjacent, kNorm> keys(p.rope, args);
    row_block<In, kFormatK, Where>(p, args, 0, block, keys, shared);
  } else if (block < 2 * blocks.rows) {
    row_block<In, kFormatV, Where>(p, args, 1, block - blocks.rows, NoRotation(), shared);
  } else {
    const uint32_t part = block - 2 * blocks.rows;
    const RopeAddresses q[2] = {{args.at[0], args.at[2], args.at[5], 0}, {0, 0, 0, 0}};
    rope_block<In, In, kAdjacent, kNorm>(p.rope, args, q, {part / blocks.q_y, part % blocks.q_y});
  }
}

}  // namespace gyre::cuda
