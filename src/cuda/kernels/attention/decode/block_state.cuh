#pragma once
// Decode attention: what the warps of a block share.
#include "cuda/kernels/attention/decode/problem.cuh"
#include "cuda/kernels/attention/decode/query_operands.cuh"
#include "cuda/kernels/block_instructions.cuh"

namespace gyre::cuda {

// A row's state in one warp. Its values are sums relative to `reference`, times `scale`.
struct WarpState {
  float max, sum, reference, scale;
};

// Begins the block's shared memory.
struct BlockState {
  WarpState of_warp[kDecodeMaxWarps][kDecodeMaxRows];
  MaskRow mask[kDecodeMaxRows];
  RowFactors factor;
  SharedLevelTable table_k, table_v;
  TransactionBarrier transactions;
  RowTarget targets[kDecodeMaxRows];
  float2 of_row[kDecodeMaxRows];  // {max, sum} of rows that several warps merge
  bool last[kDecodeMaxRows];      // whether this block merges them
};
static_assert(sizeof(BlockState) <= kDecodeStateBytes);

}  // namespace gyre::cuda
