#pragma once
// Attention of many rows over pages: work tiles of the sequences of a batch, found on the device.
// Stages begin at multiples of their size and a tile's keys are never split, so that a row's bits
// depend neither on the batch nor on the chunks in which a prompt came.
#include "cuda/kernels/attention/common/block_scan.cuh"
#include "cuda/kernels/attention/common/row_tile.cuh"

namespace gyre::cuda {

inline abi::BatchSequence batch_sequence(const abi::AttentionParams& p, const Args& args,
                                         uint64_t index) {
  using enum abi::AttentionArg;
  const auto* const begins = pointer<const int32_t>(args.at[arg_cu_seqlens_q]);
  return abi::batch_sequence(p.table, p.tokens, begins[index], begins[index + 1],
                             pointer<const int32_t>(args.at[arg_kv_lengths])[index]);
}

// Work tiles of one KV head of a sequence; 0: another command's, or none.
inline uint64_t sequence_tiles(const RowTile& problem, const Args& args, uint64_t index) {
  using enum abi::AttentionArg;
  const abi::AttentionParams& p = problem.params;
  if (index >= p.table.sequences) return 0;
  const bool prompt =
      args.at[arg_is_prefill] != 0 && pointer<const uint8_t>(args.at[arg_is_prefill])[index] != 0;
  const uint64_t tokens = batch_sequence(p, args, index).tokens;
  if (tokens == 0 || !abi::attention_takes(p.phase, tokens, problem.group, prompt)) return 0;
  return divide(tokens * problem.group + problem.tile_rows - 1, problem.tile_rows);
}

// The sequence that has work tile `index`, and the tile's number in it, in first_row for now; how
// many tiles there are at all. `of_warps`: a word for each warp, in shared memory. For all threads
// together.
inline void find_batch_tile(RowTile& problem, const Args& args, uint64_t* of_warps) {
  const abi::AttentionParams& p = problem.params;
  const uint64_t wanted = problem.index;
  uint64_t before = 0;
  for (uint64_t base = 0; base < p.table.sequences && before <= wanted; base += blockDim.x) {
    uint64_t all = 0;
    const uint64_t sequence = base + threadIdx.x;
    const uint64_t tiles = sequence_tiles(problem, args, sequence) * p.kv_heads;
    const uint64_t first = before + scan_block(tiles, of_warps, all);
    if (first <= wanted && wanted - first < tiles)
      problem.sequence = sequence, problem.first_row = wanted - first;
    before += all;
  }
  __syncthreads();
  if (threadIdx.x == 0) problem.count = before;
  __syncthreads();
}

// The walk over the keys in pages that some row of the tile sees.
inline void place_page_walk(RowTile& problem) {
  const int64_t begin = problem.bounds(problem.token(0)).begin,
                end = problem.bounds(problem.token(problem.rows - 1)).end;
  const uint64_t keys = end > begin ? static_cast<uint64_t>(end - begin) : 0;
  problem.walk_key = begin;
  problem.walk = {};
  if (keys == 0) return;
  const uint64_t stage = problem.stage_keys, first = static_cast<uint64_t>(begin);
  const uint64_t base = divide(first, stage) * stage;
  problem.base_tile = base / abi::kKvTile;
  abi::KvWalk<uint64_t>& w = problem.walk;
  w.skip = first - base;
  w.end_a = w.skip + keys;
  w.tiles = w.tiles_a = (w.end_a + abi::kKvTile - 1) / abi::kKvTile;
  w.end_b = w.tiles_a * abi::kKvTile;
  w.starts_a = keys < stage ? 0 : keys - stage + 1;
}

// The rows and keys of the tile that find_batch_tile found. One thread.
inline void place_batch_tile(RowTile& problem, const Args& args) {
  using enum abi::AttentionArg;
  const abi::AttentionParams& p = problem.params;
  const abi::BatchSequence of = batch_sequence(p, args, problem.sequence);
  const uint64_t tiles = sequence_tiles(problem, args, problem.sequence);
  problem.kv_head = divide(problem.first_row, tiles);
  problem.first_row = (problem.first_row - problem.kv_head * tiles) * problem.tile_rows;
  problem.rows = static_cast<uint32_t>(
      abi::kv_least(of.tokens * problem.group - problem.first_row, problem.tile_rows));
  problem.split = 0;
  problem.first_token = of.first_token;
  problem.entries = pointer<const uint32_t>(args.at[arg_table]) +
                    problem.sequence * p.table.stride + p.table.first_entry;
  problem.invalid = of.valid ? 0 : 1;
  place_head(problem, args);
  const auto length = static_cast<int64_t>(of.length);
  problem.first_key = 0, problem.last_key = length;
  problem.mask = {length, static_cast<int64_t>(of.tokens), abi::row_window<int64_t>(p.window),
                  p.causal != 0};
  abi::fill_segment(problem.mask, p.segment, p.places,
                    abi::batch_tail_begin(pointer<const int32_t>(args.at[arg_tail_begin]),
                                          problem.sequence, of.length));
  place_page_walk(problem);
}

}  // namespace gyre::cuda
