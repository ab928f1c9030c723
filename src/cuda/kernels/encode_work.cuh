#pragma once
// How much work a block of kv_feedback and of kv_transform takes, for the kernels and for those who
// launch them.
#include "abi/kv_feedback.h"
#include "cuda/kernels/block_work.cuh"

namespace gyre::cuda {

// kv_feedback. A block takes one row: for products a thread to one or two coordinates of them; for
// each scale block of the row a warp to a gain, and beside them a thread to a coordinate.
constexpr uint32_t kEncodeMaxThreads = 2 * abi::kKvScaleBlock;
static_assert(32 * abi::kKvMaxGains + abi::kKvScaleBlock <= kEncodeMaxThreads);
static_assert(abi::kKvMaxCalibratedDim <= kEncodeMaxThreads);
constexpr uint32_t encode_threads(const abi::KvFeedbackStream& s) {
  const uint32_t block = abi::kv_calibrated_block(s.head_dim);
  const uint32_t products = 2 * block, chains = 32 * s.gains + block;
  return ((products > chains ? products : chains) + 31) & ~31u;
}
struct EncodeShared {
  float y[abi::kKvMaxCalibratedDim];
  float b[2][abi::kKvMaxCalibratedDim];  // matrix y, then z; inverse y, then w
  float carried[abi::kKvScaleBlock];     // what errors of the blocks before add
  float p[abi::kKvScaleBlock];
  float t[abi::kKvMaxGains][abi::kKvScaleBlock];
  float score[abi::kKvMaxGains];
  uint32_t largest[kEncodeMaxThreads / 32];
};

// With many tokens a block takes a tile of rows of one head instead, 16 threads to a row: the rows
// share what is read of the matrices, and a thread runs the chain of a row at a gain.
constexpr uint32_t kEncodeTileTokens = 16;  // from here on
constexpr uint32_t kEncodeRowThreads = 16, kEncodeMaxTileRows = 16, kEncodeLeastTileRows = 4;
static_assert(abi::kKvMaxGains + 1 <= kEncodeRowThreads);
constexpr uint32_t kEncodeSlab = 16;  // columns of the factor that lie in shared memory at a time
constexpr uint32_t encode_stride(uint32_t head_dim) { return head_dim + 1; }  // no bank conflicts
// As EncodeTile has it: two slabs; then of every row y, z and w, for every gain errors and targets,
// and of every chain what is added to a slab.
constexpr uint32_t encode_tile_bytes(const abi::KvFeedbackStream& s, uint32_t rows) {
  const uint32_t of_row =
      encode_stride(s.head_dim) * (3 + 2 * s.gains) + (kEncodeSlab + 1) * (s.gains + 1);
  return 4 * (2 * kEncodeSlab * s.head_dim + rows * of_row);
}
constexpr uint32_t encode_tile_bytes(const abi::KvFeedbackParams& p, uint32_t rows) {
  const uint32_t k = encode_tile_bytes(p.stream[0], rows), v = encode_tile_bytes(p.stream[1], rows);
  return k > v ? k : v;
}
// Rows of one scale block, where the smallest tile fits into what a block has on every GPU: not
// with 7 gains at 256.
constexpr bool encode_takes_tiles(const abi::KvFeedbackParams& p) {
  return p.tokens >= kEncodeTileTokens && p.stream[0].head_dim <= abi::kKvScaleBlock &&
         p.stream[1].head_dim <= abi::kKvScaleBlock &&
         encode_tile_bytes(p, kEncodeLeastTileRows) <= 96 * 1024;
}
// tile_rows: of tiles.
constexpr uint64_t encode_blocks(const abi::KvFeedbackParams& p, uint32_t stream,
                                 uint32_t tile_rows) {
  if (p.stream[stream].head_dim == 0) return 0;
  return (encode_takes_tiles(p) ? (p.tokens + tile_rows - 1) / tile_rows : p.tokens) * p.heads;
}

// kv_transform. A block takes rows of one KV head and has all outputs of its rows, because they may
// lie where the rows are. With few rows the matrix passes through shared memory, and a thread has
// kColumns outputs of one row. With many a thread has kColumns outputs of each of kRows rows, so
// that a number of the matrix, once loaded, is used kRows times.
struct TransformShape {
  uint32_t columns, rows;  // of a thread
};
constexpr uint32_t kTransformFewRows = 512;  // of all heads: up to here a row to a thread
constexpr TransformShape transform_shape(const abi::KvTransformParams& p) {
  const bool few = p.tokens * p.heads <= kTransformFewRows;
  if (p.head_dim > 512) return {4, few ? 1u : 16u};
  if (few) return {p.head_dim > 256 ? 4u : 1u, 1};
  return {2, 16};
}
// Threads that share a row, a power of two.
constexpr uint32_t transform_lanes(uint32_t head_dim, uint32_t columns) {
  uint32_t lanes = 8;
  for (uint32_t i = 0; i < 5; ++i) lanes *= lanes * columns < head_dim ? 2 : 1;
  return lanes;
}
constexpr uint32_t transform_block_rows(uint32_t lanes, uint32_t rows) {
  return kBlockThreads / lanes * rows;
}
// Few rows: two stages of the matrix, then the rows.
constexpr uint32_t kTransformStageBytes = 32 * 1024;
constexpr uint32_t transform_stage_rows(uint32_t head_dim) {  // of the matrix
  return kTransformStageBytes / 4 / head_dim;
}
// Many rows: an address for every row, then up to kTransformChunk coordinates of all rows.
constexpr uint32_t kTransformChunk = 512;
constexpr uint32_t kTransformPadding = 4;  // from coordinate to coordinate: fewer bank conflicts
constexpr uint32_t transform_addresses(uint32_t block_rows) { return (block_rows + 1) / 2 * 2; }
constexpr uint32_t transform_shared_bytes(uint32_t head_dim, uint32_t block_rows, bool few) {
  if (few) return 2 * kTransformStageBytes + 4 * head_dim * block_rows;
  const uint32_t coordinates = head_dim < kTransformChunk ? head_dim : kTransformChunk;
  return 8 * transform_addresses(block_rows) + 4 * coordinates * (block_rows + kTransformPadding);
}

}  // namespace gyre::cuda
