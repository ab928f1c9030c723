#pragma once
// How much work a block of kv_encode and of kv_basis takes, for the kernels and for those who
// launch them.
#include "abi/kv_encode.h"
#include "cuda/kernels/block_work.cuh"

namespace gyre::cuda {

// kv_encode. A block takes one row: a warp to a gain, and beside them a thread to a coordinate.
constexpr uint32_t kEncodeMostThreads = 2 * abi::kKvMostCodedDim;
static_assert(32 * abi::kKvMostGains + abi::kKvMostCodedDim <= kEncodeMostThreads);
constexpr uint32_t encode_threads(const abi::KvEncodeStream& s) {
  const uint32_t products = 2 * s.head_dim, chains = 32 * s.gains + s.head_dim;
  return ((products > chains ? products : chains) + 31) & ~31u;
}
constexpr uint64_t encode_rows(const abi::KvEncodeParams& p, uint32_t stream) {
  return p.stream[stream].head_dim != 0 ? p.tokens * p.heads : 0;
}

// kv_basis. A block takes rows of one KV head: a thread has kColumns outputs of each of kRows rows,
// so that a number of the matrix, once loaded, is used kRows times. A block has all outputs of its
// rows, because they may lie where the rows are.
struct BasisShape {
  uint32_t columns, rows;  // of a thread
};
constexpr uint32_t kBasisFewRows = 512;  // of all heads: up to here a row to a thread
constexpr BasisShape basis_shape(const abi::KvBasisParams& p) {
  const bool few = p.tokens * p.heads <= kBasisFewRows;
  if (p.head_dim > 512) return {4, few ? 1u : 16u};
  if (few) return {p.head_dim > 256 ? 4u : 1u, 1};
  return {2, 16};
}
// Threads that share a row, a power of two.
constexpr uint32_t basis_lanes(uint32_t head_dim, uint32_t columns) {
  uint32_t lanes = 8;
  for (uint32_t i = 0; i < 5; ++i) lanes *= lanes * columns < head_dim ? 2 : 1;
  return lanes;
}
constexpr uint32_t basis_block_rows(uint32_t lanes, uint32_t rows) {
  return kBlockThreads / lanes * rows;
}
// Shared memory: an address for every row, then up to kBasisChunk coordinates of all rows.
constexpr uint32_t kBasisChunk = 512;
constexpr uint32_t kBasisPadding = 4;  // from coordinate to coordinate: fewer bank conflicts
constexpr uint32_t basis_addresses(uint32_t block_rows) { return (block_rows + 1) / 2 * 2; }
constexpr uint32_t basis_shared_bytes(uint32_t head_dim, uint32_t block_rows) {
  const uint32_t coordinates = head_dim < kBasisChunk ? head_dim : kBasisChunk;
  return 8 * basis_addresses(block_rows) + 4 * coordinates * (block_rows + kBasisPadding);
}

}  // namespace gyre::cuda
