#pragma once
// Rows of floats: to a row of other floats by some lanes, and from or to registers.
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/rotation.cuh"

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

// A row as RowPlace has it, from memory and to it.
template <class T, uint32_t kSlots>
__device__ void load_row(const RowPlace<kSlots>& at, const T* row, float (&y)[kSlots][kChunk]) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (at.active(s)) {
      load_floats(row + at.begin(s), y[s]);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i) y[s][i] = 0.0f;
    }
  }
}

template <class T, uint32_t kSlots>
__device__ void store_row(const RowPlace<kSlots>& at, const float (&y)[kSlots][kChunk], T* row) {
#pragma unroll
  for (uint32_t s = 0; s < kSlots; ++s) {
    if (at.active(s)) store_floats(y[s], row + at.begin(s));
  }
}

// The type of a row's values, by its KvFormat.
template <uint32_t kFormat>
using DenseType =
    typename Choose<kFormat == 0, float, typename Choose<kFormat == 1, Half, BFloat16>::type>::type;

}  // namespace gyre::cuda
