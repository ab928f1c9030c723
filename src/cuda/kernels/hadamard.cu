// hadamard: out = transform(signs * x) / sqrt(n) per block of a row, or the inverse.
// Up to 1024 points a row lies in 4 to 32 lanes of a warp, 16 or 32 coordinates a lane; longer
// rows, powers of two up to 8192, lie in the shared memory of a block; rows of 2 and 4 are a
// thread's. Every byte is read and written once.
#include "abi/hadamard.h"
#include "abi/kv_codec.h"
#include "cuda/kernels/attention/common/rotate_row.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

struct HadamardRow {
  uint64_t x, out;

  __device__ HadamardRow(const abi::HadamardParams& p, const Args& args, uint64_t row) {
    const uint64_t outer = row / p.rows[1], inner = row % p.rows[1];
    x = args.at[0] + outer * p.x_stride[0] + inner * p.x_stride[1];
    out = args.at[1] + outer * p.out_stride[0] + inner * p.out_stride[1];
  }
};

template <class In, class Out, uint32_t kSlots>
__device__ void hadamard_in_registers(const abi::HadamardParams& p, const Args& args) {
  const RowPlace<kSlots> at(p.head_dim);
  const uint64_t row = uint64_t{blockIdx.x} * (kBlockThreads / at.lanes) + threadIdx.x / at.lanes;
  const bool present = row < p.rows[0] * p.rows[1];
  const HadamardRow memory(p, args, present ? row : 0);
  const SignBytes& signs = p.signs == 2 ? kMlxNativeSigns : kNativeSigns;  // HadamardSigns
  float y[kSlots][kChunk] = {};
  if (present) load_row(at, pointer<const In>(memory.x), y);
  if (p.signs != 0 && p.inverse == 0) flip_signs(at, signs, y);
  transform<false>(at, y);
  scale_transformed(at, y);
  if (p.signs != 0 && p.inverse != 0) flip_signs(at, signs, y);
  if (present) store_row(at, y, pointer<Out>(memory.out));
}

__device__ inline uint32_t shared_stage(uint32_t nth, uint32_t n) {  // 4, 8, ... n / 2, 1, 2
  const uint32_t step = 4u << nth;
  return step < n ? step : step / n;
}

template <class In, class Out>
__device__ void hadamard_in_shared(const abi::HadamardParams& p, const Args& args, float* y) {
  const uint32_t n = p.head_dim;
  const HadamardRow memory(p, args, blockIdx.x);
  for (uint32_t i = threadIdx.x; i < n; i += kBlockThreads)
    y[i] = widen(pointer<const In>(memory.x)[i]);
  __syncthreads();
  for (uint32_t nth = 0; (1u << nth) < n; ++nth) {
    const uint32_t step = shared_stage(nth, n);
    for (uint32_t i = threadIdx.x; i < n / 2; i += kBlockThreads) {
      const uint32_t low = (i & ~(step - 1)) * 2 + (i & (step - 1));
      butterfly(y[low], y[low + step]);
    }
    __syncthreads();
  }
  const float factor = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(n)));
  for (uint32_t i = threadIdx.x; i < n; i += kBlockThreads)
    pointer<Out>(memory.out)[i] = from_float<Out>(y[i] * factor);
}

template <class In, class Out>
__device__ void hadamard_small(const abi::HadamardParams& p, const Args& args) {
  const uint64_t row = uint64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (row >= p.rows[0] * p.rows[1]) return;
  const HadamardRow memory(p, args, row);
  float y[4] = {};
  const auto flip = [&](float v, uint32_t i) {
    const bool negative = p.signs != 0 && (kNativeSigns.of[0] >> i & 1) != 0;
    return negative ? -v : v;
  };
  for (uint32_t i = 0; i < p.head_dim; ++i) {
    y[i] = widen(pointer<const In>(memory.x)[i]);
    if (p.inverse == 0) y[i] = flip(y[i], i);
  }
  butterfly(y[0], y[1]);
  if (p.head_dim == 4) butterfly(y[2], y[3]), butterfly(y[0], y[2]), butterfly(y[1], y[3]);
  const float factor = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(p.head_dim)));
  for (uint32_t i = 0; i < p.head_dim; ++i) {
    const float v = y[i] * factor;
    pointer<Out>(memory.out)[i] = from_float<Out>(p.inverse != 0 ? flip(v, i) : v);
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kBlockThreads)
    hadamard(const __grid_constant__ abi::HadamardParams p, const __grid_constant__ Args args) {
  float* const y = dynamic_floats();
  pdl_wait();
  pdl_launch_dependents();
  if (p.head_dim < kChunk) return hadamard_small<In, Out>(p, args);
  if (p.head_dim > abi::kKvMaxHeadDim) return hadamard_in_shared<In, Out>(p, args, y);
  if (takes_many_slots(p.head_dim)) return hadamard_in_registers<In, Out, kManySlots>(p, args);
  hadamard_in_registers<In, Out, kFewSlots>(p, args);
}

}  // namespace gyre::cuda
