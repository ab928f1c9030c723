#pragma once
// A row of floats to a row of other floats, by some lanes.
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/convert.cuh"

namespace gyre::cuda {

template <class Source, class Target>
__device__ void copy_row(const Source* from, Target* to, uint32_t head_dim, uint32_t lane,
                         uint32_t lanes) {
  const uint32_t chunks = head_dim / kChunk;
  for (uint32_t c = lane; c < chunks; c += lanes)
    copy_elements<Source, Target, kChunk>(from + c * kChunk, to + c * kChunk);
  for (uint32_t i = chunks * kChunk + lane; i < head_dim; i += lanes)
    copy_elements<Source, Target, 1>(from + i, to + i);
}

template <uint32_t kFormat>
struct DenseType;
template <>
struct DenseType<0> {
  using Type = float;
};
template <>
struct DenseType<1> {
  using Type = Half;
};
template <>
struct DenseType<2> {
  using Type = BFloat16;
};

}  // namespace gyre::cuda
