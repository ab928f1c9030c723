// kv_transform: out = matrix (x - before) + after. A block takes rows of one KV head, of its query
// heads and of several tokens: they share the matrix. Many rows lie in shared memory, coordinate by
// coordinate, so that the rows of a thread are one wide load; few lie there row by row, beside
// stages of the matrix. Every byte of x and out is moved once.
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/encode_work.cuh"
#include "cuda/kernels/kernel_args.cuh"
#include "cuda/kernels/matrix.cuh"

namespace gyre::cuda {

// Rows [first, ...) of a KV head; a row is a query head of a token.
struct TransformRows {
  const abi::KvTransformParams& p;
  uint64_t kv_head;
  uint64_t first;

  __device__ bool exists(uint32_t row) const { return first + row < p.tokens * p.group; }
  __device__ uint64_t offset(uint32_t row, uint64_t token_stride, uint64_t head_stride) const {
    const uint64_t at = first + row, token = at / p.group;
    return token * token_stride + (kv_head * p.group + (at - token * p.group)) * head_stride;
  }
};

// x - before of coordinates [begin, begin + count), `row_stride` from row to row in x.
template <class X>
__device__ void load_transform_rows(const TransformRows& rows, const Args& args,
                                    uint32_t block_rows, uint32_t begin, uint32_t count,
                                    uint32_t stride, uint32_t row_stride, float* x) {
  const uint32_t n = rows.p.head_dim;
  const float* const before =
      args.at[2] != 0 ? pointer<const float>(args.at[2]) + rows.kv_head * n : nullptr;
  // A power of two of threads to a row.
  const uint32_t lanes = kBlockThreads < count ? kBlockThreads : transform_lanes(count, 1);
#pragma unroll 1
  for (uint32_t row = threadIdx.x / lanes; row < block_rows; row += kBlockThreads / lanes) {
    const bool exists = rows.exists(row);
    const X* const from = pointer<const X>(
        args.at[0] + (exists ? rows.offset(row, rows.p.x_token_stride, rows.p.x_head_stride) : 0));
#pragma unroll 1
    for (uint32_t j = threadIdx.x & (lanes - 1); j < count; j += lanes) {
      float v = exists ? widen(from[begin + j]) : 0.0f;
      if (before != nullptr) v = v - before[begin + j];
      x[j * stride + row * row_stride] = v;
    }
  }
}

__device__ inline float after_of(const TransformRows& rows, const Args& args, uint32_t i) {
  if (args.at[3] == 0) return -0.0f;  // which changes no sum
  return pointer<const float>(args.at[3])[rows.kv_head * rows.p.head_dim + i];
}

// Rows [begin, ...) of the matrix to a stage.
__device__ inline void fetch_stage(const float* matrix, uint32_t n, uint32_t begin, float* stage) {
  const uint32_t rows = transform_stage_rows(n), left = n - begin;
  const uint32_t count = (left < rows ? left : rows) * n;
  const float* const from = matrix + uint64_t{begin} * n;
  if (is_aligned(from, 16)) {
#pragma unroll 4
    for (uint32_t i = threadIdx.x * 4; i < count; i += kBlockThreads * 4)
      copy_async<16>(shared_address(stage + i), from + i, true);
  } else {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count; i += kBlockThreads)
      copy_async<4>(shared_address(stage + i), from + i, true);
  }
}

// A function of its own: NVRTC takes minutes otherwise.
__device__ __noinline__ void ask_for_matrix(const Args& args, uint32_t n) {
  prefetch_matrix(pointer<const float>(args.at[1]) + uint64_t{blockIdx.y} * n * n, n);
}

// A thread has outputs of one row: nothing is waited for but the row, and the matrix a stage ahead.
// Up to 128 coordinates the matrix is two stages, which are there when the command ahead ends,
// unless that one writes it.
template <class X, class Out, uint32_t kColumns>
__device__ __noinline__ void few_transform_rows(const abi::KvTransformParams& p,
                                                const EarlyArgs& args) {
  constexpr uint32_t kConstants = 1u << 1 | 1u << 3;  // the matrix, after
  const bool early = (args.early & kConstants) == kConstants;
  if (early) {
    pdl_read_early();
  } else {
    ask_for_matrix(args, p.head_dim);
    pdl_wait();
  }
  const uint32_t n = p.head_dim, lanes = transform_lanes(n, kColumns),
                 each = transform_stage_rows(n);
  const uint32_t block_rows = transform_block_rows(lanes, 1);
  const uint32_t column = threadIdx.x & (lanes - 1), row = threadIdx.x / lanes;
  const TransformRows rows{p, blockIdx.y, uint64_t{blockIdx.x} * block_rows};
  const float* const matrix = pointer<const float>(args.at[1]) + rows.kv_head * n * n;
  auto* const stages = reinterpret_cast<float*>(dynamic_shared());
  float* const x = stages + 2 * kTransformStageBytes / 4;
#pragma unroll 1
  for (uint32_t stage = 0; stage < 2; ++stage) {
    if (stage * each < n) fetch_stage(matrix, n, stage * each, stages + stage * each * n);
    copy_commit();
  }
  float sum[kColumns] = {}, after[kColumns];
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) {
    const uint32_t i = column + c * lanes;
    after[c] = i < n ? after_of(rows, args, i) : 0.0f;
  }
  if (early) pdl_wait();
  pdl_launch_dependents();
  load_transform_rows<X>(rows, args, block_rows, 0, n, 1, n, x);
#pragma unroll 1
  for (uint32_t begin = 0, stage = 0; begin < n; begin += each, stage ^= 1) {
    copy_wait<1>();
    __syncthreads();
    const float* const from = stages + stage * each * n;
    const uint32_t count = n - begin < each ? n - begin : each;
#pragma unroll 8
    for (uint32_t j = 0; j < count; ++j) {
      const float v = x[row * n + begin + j];
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) {
        const uint32_t i = column + c * lanes;
        sum[c] = __fmaf_rn(i < n ? from[j * n + i] : 0.0f, v, sum[c]);
      }
    }
    __syncthreads();
    if (begin + 2 * each < n) fetch_stage(matrix, n, begin + 2 * each, stages + stage * each * n);
    copy_commit();
  }
  if (!rows.exists(row)) return;
  auto* const out =
      pointer<Out>(args.at[4] + rows.offset(row, p.out_token_stride, p.out_head_stride));
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) {
    const uint32_t i = column + c * lanes;
    if (i < n) out[i] = from_float<Out>(sum[c] + after[c]);
  }
}

// A function of its own: two of them inlined take NVRTC minutes.
template <class X, class Out, uint32_t kColumns, uint32_t kRows>
__device__ __noinline__ void transform_rows(const abi::KvTransformParams& p, const Args& args) {
  const uint32_t n = p.head_dim, lanes = transform_lanes(n, kColumns);
  const uint32_t block_rows = transform_block_rows(lanes, kRows),
                 stride = block_rows + kTransformPadding;
  const uint32_t column = threadIdx.x & (lanes - 1), row = threadIdx.x / lanes * kRows;
  const TransformRows rows{p, blockIdx.y, uint64_t{blockIdx.x} * block_rows};
  const float* const matrix = pointer<const float>(args.at[1]) + rows.kv_head * n * n;
  uint64_t* const outs =
      reinterpret_cast<uint64_t*>(dynamic_shared());  // addresses of rows; 0: there is none
  auto* const x = reinterpret_cast<float*>(outs + transform_addresses(block_rows));
#pragma unroll 1
  for (uint32_t r = threadIdx.x; r < block_rows; r += kBlockThreads)
    outs[r] =
        rows.exists(r) ? args.at[4] + rows.offset(r, p.out_token_stride, p.out_head_stride) : 0;
  float sum[kColumns][kRows] = {};
#pragma unroll 1
  for (uint32_t begin = 0; begin < n; begin += kTransformChunk) {
    const uint32_t count = n - begin < kTransformChunk ? n - begin : kTransformChunk;
    if (begin != 0) __syncthreads();
    load_transform_rows<X>(rows, args, block_rows, begin, count, stride, 1, x);
    __syncthreads();
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
      float v[kRows];
      load_entries<kRows % 4 == 0>(x + j * stride + row, v);
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
    const float after = after_of(rows, args, i);
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint64_t out = outs[row + r];
      if (out != 0) pointer<Out>(out)[i] = from_float<Out>(sum[c][r] + after);
    }
  }
}

template <class X, class Out>
__global__ void __launch_bounds__(kBlockThreads)
    kv_transform(const __grid_constant__ abi::KvTransformParams p,
                 const __grid_constant__ EarlyArgs args) {
  const TransformShape shape = transform_shape(p);
  if (shape.rows == 1) {
    if (shape.columns == 1) {
      few_transform_rows<X, Out, 1>(p, args);
    } else {
      few_transform_rows<X, Out, 4>(p, args);
    }
    return;
  }
  pdl_wait();
  pdl_launch_dependents();
  if (shape.columns == 2) {
    transform_rows<X, Out, 2, 16>(p, args);
  } else {
    transform_rows<X, Out, 4, 16>(p, args);
  }
}

}  // namespace gyre::cuda
