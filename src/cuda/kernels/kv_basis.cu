// kv_basis: out = matrix (x - before) + after. A block takes rows of one KV head, of its query
// heads and of several tokens: they share the matrix. Rows lie in shared memory, coordinate by
// coordinate, so that the rows of a thread are one wide load. Every byte of x and out is moved
// once.
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/encode_work.cuh"
#include "cuda/kernels/matrix.cuh"

namespace gyre::cuda {

// Rows [first, ...) of a KV head; a row is a query head of a token.
struct BasisRows {
  const abi::KvBasisParams& p;
  uint64_t kv_head;
  uint64_t first;

  __device__ bool exists(uint32_t row) const { return first + row < p.tokens * p.group; }
  __device__ uint64_t offset(uint32_t row, uint64_t token_stride, uint64_t head_stride) const {
    const uint64_t at = first + row, token = at / p.group;
    return token * token_stride + (kv_head * p.group + (at - token * p.group)) * head_stride;
  }
};

// x - before of coordinates [begin, begin + count) to x[coordinate][row].
template <class X>
__device__ void load_basis_rows(const BasisRows& rows, const Args& args, uint32_t block_rows,
                                uint32_t begin, uint32_t count, float* x) {
  const uint32_t stride = block_rows + kBasisPadding, n = rows.p.head_dim;
  const float* const before =
      args.at[2] != 0 ? pointer<const float>(args.at[2]) + rows.kv_head * n : nullptr;
  // A power of two of threads to a row.
  const uint32_t lanes = kBlockThreads < count ? kBlockThreads : basis_lanes(count, 1);
#pragma unroll 1
  for (uint32_t row = threadIdx.x / lanes; row < block_rows; row += kBlockThreads / lanes) {
    const bool exists = rows.exists(row);
    const X* const from = pointer<const X>(
        args.at[0] + (exists ? rows.offset(row, rows.p.x_token_stride, rows.p.x_head_stride) : 0));
#pragma unroll 1
    for (uint32_t j = threadIdx.x & (lanes - 1); j < count; j += lanes) {
      float v = exists ? widen(from[begin + j]) : 0.0f;
      if (before != nullptr) v = v - before[begin + j];
      x[j * stride + row] = v;
    }
  }
}

// kCount consecutive floats, by fours where there are as many.
template <uint32_t kCount>
__device__ void load_shared(const float* from, float (&x)[kCount]) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) x[i] = from[i];
  }
}

__device__ inline uint64_t* basis_shared() {
#if defined(GYRE_CUDA_HOST)
  return reinterpret_cast<uint64_t*>(cuda_host::dynamic_shared());
#else
  extern __shared__ uint4 rows[];
  return reinterpret_cast<uint64_t*>(rows);
#endif
}

// A function of its own: two of them inlined take NVRTC minutes.
template <class X, class Out, uint32_t kColumns, uint32_t kRows>
__device__ __noinline__ void basis_rows(const abi::KvBasisParams& p, const Args& args) {
  const uint32_t n = p.head_dim, lanes = basis_lanes(n, kColumns);
  const uint32_t block_rows = basis_block_rows(lanes, kRows), stride = block_rows + kBasisPadding;
  const uint32_t column = threadIdx.x & (lanes - 1), row = threadIdx.x / lanes * kRows;
  const BasisRows rows{p, blockIdx.y, uint64_t{blockIdx.x} * block_rows};
  const float* const matrix = pointer<const float>(args.at[1]) + rows.kv_head * n * n;
  uint64_t* const outs = basis_shared();  // addresses of rows; 0: there is none
  auto* const x = reinterpret_cast<float*>(outs + basis_addresses(block_rows));
  if constexpr (kRows == 1) prefetch_matrix(matrix, n);
#pragma unroll 1
  for (uint32_t r = threadIdx.x; r < block_rows; r += kBlockThreads)
    outs[r] =
        rows.exists(r) ? args.at[4] + rows.offset(r, p.out_token_stride, p.out_head_stride) : 0;
  float sum[kColumns][kRows] = {};
#pragma unroll 1
  for (uint32_t begin = 0; begin < n; begin += kBasisChunk) {
    const uint32_t count = n - begin < kBasisChunk ? n - begin : kBasisChunk;
    if (begin != 0) __syncthreads();
    load_basis_rows<X>(rows, args, block_rows, begin, count, x);
    __syncthreads();
#pragma unroll(kRows == 1 ? 8 : 4)
    for (uint32_t j = 0; j < count; ++j) {
      float v[kRows];
      load_shared(x + j * stride + row, v);
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) {
        const uint32_t i = column + c * lanes;
        const float entry = i < n ? matrix[uint64_t{begin + j} * n + i] : 0.0f;
#pragma unroll
        for (uint32_t r = 0; r < kRows; ++r) sum[c][r] = __fmaf_rn(entry, v[r], sum[c][r]);
      }
    }
  }
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) {
    const uint32_t i = column + c * lanes;
    if (i >= n) continue;
    const float after =
        args.at[3] != 0 ? pointer<const float>(args.at[3])[rows.kv_head * n + i] : -0.0f;
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint64_t out = outs[row + r];
      if (out != 0) pointer<Out>(out)[i] = from_float<Out>(sum[c][r] + after);
    }
  }
}

template <class X, class Out>
__global__ void __launch_bounds__(kBlockThreads)
    kv_basis(const __grid_constant__ abi::KvBasisParams p, const __grid_constant__ Args args) {
  pdl_wait();
  pdl_launch_dependents();
  const BasisShape shape = basis_shape(p);
  if (shape.rows == 1) {
    if (shape.columns == 1) {
      basis_rows<X, Out, 1, 1>(p, args);
    } else {
      basis_rows<X, Out, 4, 1>(p, args);
    }
  } else if (shape.columns == 2) {
    basis_rows<X, Out, 2, 16>(p, args);
  } else {
    basis_rows<X, Out, 4, 16>(p, args);
  }
}

}  // namespace gyre::cuda
