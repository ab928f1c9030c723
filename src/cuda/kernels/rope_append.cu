// rope_append for few tokens: rotates q, rotates and stores k, stores v, in one launch. Time is
// latency: rows are spread over warps and blocks. Blocks of 256 threads take 8 rows of K or of V, a
// warp each (quad_row.cuh, store_quads.cuh), or a part of q as rope does. A rotated row of K lies
// in shared memory, in the dtype that rope would leave it in, and is then stored as any other is.
// Where rows go and the old words of V's tiles are read before pdl_wait where Args::early allows
// it. Every byte of q, k and v is read once (with the norm twice).
#include "abi/rope_append.h"
#include "cuda/kernels/rotated_rows.cuh"
#include "cuda/kernels/write_target.cuh"

namespace gyre::cuda {

constexpr uint32_t kWhereArg = 7;
constexpr uint32_t side_arg(uint32_t stream) {  // source, codes, scales, sink tokens and tail
  return kWhereArg + 1 + 4 * stream;
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

// The row of a warp. kRotates: rows of K may come.
template <class In, uint32_t kFormat, class Where, uint32_t kQuads, bool kRotates, class Rotation>
__device__ void store_step_row(const abi::RopeAppendParams& p, const EarlyArgs& args,
                               const StepRow& row, const Rotation& rotation) {
  const SideLayout side = side_layout<Where>(p, row.stream);
  const QuadPlace<kQuads> place(side.cache.head_dim);
  const bool is_v = side.cache.role == kRoleV;
  const uint32_t bits = 1u << kWhereArg | (is_v ? 2u << side_arg(1) : 0);
  const bool early = (args.early & bits) == bits;
  if (!early) pdl_wait();
  const RowTarget to = step_target<Where>(p, row, args.at[kWhereArg]);
  OldCodes<kFormat, kQuads> old;
  if (is_v && to.stored) old.load(place, to.tile.codes);
  if (early) pdl_wait();
  const uint64_t x = row.at[0] + row.token * side.token_stride + row.head * side.head_stride;
  const In* from = pointer<const In>(x);
  if constexpr (kRotates) {
    if (row.stream == 0) {
      rotation.rotate({x, row.token});
      from = rotation.row();
    }
  }
  const RawQuads<In, kQuads> raw(place, from);
  if (to.near != nullptr) raw.copy_to(place, to.near);
  if (to.stored) store_quads<kFormat>(side.cache, place, raw, old, to);
}

template <class In, uint32_t kFormatK, uint32_t kFormatV, bool kAdjacent, bool kNorm, class Where,
          uint32_t kQuads>
__device__ void store_step(const abi::RopeAppendParams& p, const EarlyArgs& args, uint32_t stream,
                           uint32_t block) {
  const uint32_t index = block * kStoredRows + threadIdx.x / 32;
  const auto heads = static_cast<uint32_t>(p.rope.stream[1].heads);
  const uint32_t token = index / heads;
  if (token >= p.rope.tokens) return pdl_wait();  // whole warps
  const StepRow row{stream, token, index - token * heads, args.at + side_arg(stream)};
  const KeyRotation<In, kAdjacent, kNorm> keys(p.rope, args);
  if constexpr (kFormatK == kFormatV) {
    store_step_row<In, kFormatK, Where, kQuads, true>(p, args, row, keys);
  } else if (stream == 0) {
    store_step_row<In, kFormatK, Where, kQuads, true>(p, args, row, keys);
  } else {
    store_step_row<In, kFormatV, Where, kQuads, false>(p, args, row, keys);
  }
}

template <class In, uint32_t kFormatK, uint32_t kFormatV, bool kAdjacent, bool kNorm, class Where,
          uint32_t kQuads>
__global__ void __launch_bounds__(kBlockThreads)
    rope_append(const __grid_constant__ abi::RopeAppendParams p,
                const __grid_constant__ EarlyArgs args) {
  pdl_launch_dependents();
  const RopeAppendBlocks blocks(p, sizeof(In));
  const uint32_t block = blockIdx.x;
  if (block < 2 * blocks.rows) {
    const uint32_t stream = block < blocks.rows ? 0 : 1;
    store_step<In, kFormatK, kFormatV, kAdjacent, kNorm, Where, kQuads>(
        p, args, stream, block - stream * blocks.rows);
  } else {
    pdl_wait();
    const uint32_t part = block - 2 * blocks.rows;
    const RopeAddresses q[2] = {{args.at[0], args.at[2], args.at[5], 0}, {0, 0, 0, 0}};
    rope_block<In, In, kAdjacent, kNorm>(p.rope, args, q, {part / blocks.q_y, part % blocks.q_y});
  }
}

}  // namespace gyre::cuda
