// rope and norm_rope:
//   turn(p) = position(axis(p)) * frequency(p)  mod 1    64-bit fixed point, the upper 32 bits are
//   used; (u, v) -> (u cos - v sin, u sin + v cos)       f32, rounded once when stored
// A item is one or two heads of one token: 1 to 32 lanes of a warp. Every byte of x is read once (a
// second time, from near, with the norm), every byte of out written once.
#include "cuda/kernels/rope_block.cuh"

namespace gyre::cuda {

template <class In, class Out, bool kAdjacent, bool kNorm>
__global__ void __launch_bounds__(kBlockThreads, kNorm ? 2 : 4)
    rope(const __grid_constant__ abi::RopeParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const uint64_t* const at = args.at;
  const RopeAddresses streams[2] = {{at[0], at[2], at[5], at[6]}, {at[7], at[8], at[9], at[10]}};
  rope_block<In, Out, kAdjacent, kNorm>(p, args, streams, {blockIdx.x, blockIdx.y});
}

}  // namespace gyre::cuda
