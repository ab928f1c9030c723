// kv_copy: see abi/kv_copy.h. z is the stream, y the head; a block takes some tokens at a time,
// each row by as many threads as it has chunks, and each thread a chunk of several tokens: all of
// them are on their way before the first is stored. Moves every source byte once and every cache
// byte once, 16 bytes at a time where addresses and strides allow it.
#include "abi/kv_copy.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

template <class Source, class Target>
struct HeadCopy {
  static constexpr uint32_t kCopied = copy_chunk(sizeof(Source), sizeof(Target));
  static constexpr uint32_t kTokens = copy_tokens(sizeof(Source), sizeof(Target));

  const gyre::abi::KvCopyParams& p;
  const gyre::abi::KvCopyStream& s;
  uint64_t from, to;

  void single(uint64_t token, uint64_t i) const {
    const uint64_t source = from + token * s.source_token_stride;
    const uint64_t target = to + kv_copy_slot(p, token) * s.cache_slot_stride;
    pointer<Target>(target)[i] = Convert<Target, Source>::value(pointer<const Source>(source)[i]);
  }

  // Elements [first, first + kCopied) of kTokens tokens: token, token + step, ...
  void chunks(uint64_t token, uint32_t step, uint64_t first) const {
    Words<Source, kCopied> in[kTokens];
    const uint64_t source = from + token * s.source_token_stride + first * sizeof(Source);
    const uint64_t source_step = step * s.source_token_stride;
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) {
      if (token + t * step < p.tokens)
        load_wide<kCopied>(pointer<const Source>(source + t * source_step), 0, in[t]);
    }
    const uint64_t slot = p.first_slot + token, slot_step = step * s.cache_slot_stride;
    const uint64_t target = to + slot * s.cache_slot_stride + first * sizeof(Target);
    const uint64_t all = p.capacity * s.cache_slot_stride;
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) {
      const uint64_t wrapped = slot + t * step < p.capacity ? 0 : all;
      if (token + t * step < p.tokens)
        copy_wide(in[t], pointer<Target>(target + t * slot_step - wrapped));
    }
  }
};

// __grid_constant__: indexed by the stream, which would otherwise copy them to local memory.
template <class Source, class Target>
__global__ void __launch_bounds__(256, 4)
    kv_copy(const __grid_constant__ gyre::abi::KvCopyParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  using Copy = HeadCopy<Source, Target>;
  constexpr uint32_t kCopied = Copy::kCopied, kTokens = Copy::kTokens;
  const gyre::abi::KvCopyStream& s = p.stream[blockIdx.z];
  const uint64_t elements = s.row_elements;
  if (elements == 0) return;
  const uint64_t from = args.at[2 * blockIdx.z], to = args.at[2 * blockIdx.z + 1];
  const bool wide = ((from | to | s.source_token_stride | s.source_head_stride |
                      s.cache_slot_stride | s.cache_head_stride) &
                     15) == 0;
  const uint64_t steps = wide ? (elements + kCopied - 1) / kCopied : elements;
  const uint32_t row_threads = steps < blockDim.x ? static_cast<uint32_t>(steps) : blockDim.x;
  const uint32_t rows = blockDim.x / row_threads;
  const uint32_t row = threadIdx.x / row_threads, lane = threadIdx.x - row * row_threads;
  if (row >= rows) return;
  const uint32_t each = rows * kTokens;
  for (uint64_t head = blockIdx.y; head < p.heads; head += gridDim.y) {
    const Copy copy{p, s, from + head * s.source_head_stride, to + head * s.cache_head_stride};
    for (uint64_t token = uint64_t{blockIdx.x} * each + row; token < p.tokens;
         token += uint64_t{gridDim.x} * each) {
      for (uint64_t i = lane; i < steps; i += row_threads) {
        if (wide && (i + 1) * kCopied <= elements) {
          copy.chunks(token, rows, i * kCopied);
          continue;
        }
        const uint64_t begin = wide ? i * kCopied : i, end = wide ? elements : i + 1;
#pragma unroll 1
        for (uint32_t t = 0; t < kTokens && token + t * rows < p.tokens; ++t) {
#pragma unroll 1
          for (uint64_t e = begin; e < end; ++e) copy.single(token + t * rows, e);
        }
      }
    }
  }
}

}  // namespace gyre::cuda
