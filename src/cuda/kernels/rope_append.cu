// rope_append for few tokens: rotates q, rotates and stores k, stores v, in one launch. Time is
// latency: rows are spread over warps and blocks. Blocks of 256 threads take 8 rows of K or of V, a
// warp each (write_rows.cuh), or a part of q as rope does. A rotated row of K lies in shared
// memory, in the dtype that rope would leave it in, and is then stored as any other is. Every byte
// of q, k and v is read once (with the norm twice).
#include "abi/rope_append.h"
#include "cuda/kernels/rope_block.cuh"
#include "cuda/kernels/rotated_rows.cuh"
#include "cuda/kernels/write_rows.cuh"

namespace gyre::cuda {

constexpr uint32_t kWhereArg = 7;
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
    const uint32_t row = (block - stream * blocks.rows) * kStoredRows + threadIdx.x / 32;
    if (row >= p.write.heads * p.rope.tokens) return pdl_wait();  // whole warps
    write_row<In, kFormatK, kFormatV, Where, kQuads>(
        p.write, args, kWhereArg, stream, row, KeyRotation<In, kAdjacent, kNorm>(p.rope, args));
  } else {
    pdl_wait();
    const uint32_t part = block - 2 * blocks.rows;
    const RopeAddresses q[2] = {{args.at[0], args.at[2], args.at[5], 0}, {0, 0, 0, 0}};
    rope_block<In, In, kAdjacent, kNorm>(p.rope, args, q, {part / blocks.q_y, part % blocks.q_y});
  }
}

}  // namespace gyre::cuda
