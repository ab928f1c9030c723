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

// Queries of a sequence; 0: another command's, or none.
inline uint64_t sequence_tokens(const abi::AttentionParams& p, const Args& args, uint64_t index) {
  using enum abi::AttentionArg;
  if (index >= p.table.sequences) return 0;
  const bool prompt =
      args.at[arg_is_prefill] != 0 && pointer<const uint8_t>(args.at[arg_is_prefill])[index] != 0;
  const uint64_t tokens = batch_sequence(p, args, index).tokens;
  const bool taken =
      abi::attention_takes(p.phase, tokens, p.table.max_query_length, p.group, prompt);
  return taken ? tokens : 0;
}

// Work tiles of one KV head of a sequence.
inline uint64_t sequence_tiles(const RowTile& problem, const Args& args, uint64_t index) {
  const uint64_t rows = sequence_tokens(problem.params, args, index) * problem.group;
  return divide(rows + problem.tile_rows - 1, problem.tile_rows);
}

inline abi::RowMask<int64_t> sequence_mask(const abi::AttentionParams& p, const Args& args,
                                           const abi::BatchSequence& of, uint64_t index) {
  abi::RowMask<int64_t> mask = {static_cast<int64_t>(of.length), static_cast<int64_t>(of.tokens),
                                abi::row_window<int64_t>(p.window), p.causal != 0};
  abi::fill_segment(mask, p.segment, p.places,
                    abi::batch_tail_begin(pointer<const int32_t>(args.at[abi::arg_tail_begin]),
                                          index, of.length));
  return mask;
}

// The tiles that some row of a sequence sees, [first, end), and those of their stages, from `base`
// on.
struct SequenceSpan {
  uint64_t base, count, first, end;
};
inline SequenceSpan sequence_span(const abi::AttentionParams& p, const Args& args, uint64_t index,
                                  uint32_t stage_keys) {
  if (sequence_tokens(p, args, index) == 0) return {};
  const abi::BatchSequence of = batch_sequence(p, args, index);
  const abi::RowMask<int64_t> mask = sequence_mask(p, args, of, index);
  // As in place_page_walk, of all rows.
  const auto begin = static_cast<uint64_t>(
                 abi::row_bounds(mask, int64_t{0}, int64_t{0}, mask.length).begin),
             end = static_cast<uint64_t>(
                 abi::row_bounds(mask, mask.tokens - 1, int64_t{0}, mask.length).end);
  if (end <= begin) return {};
  const uint64_t first = divide(begin, stage_keys),
                 stages = divide(end - 1, stage_keys) + 1 - first,
                 tiles = stage_keys / abi::kKvTile;
  return {first * tiles, stages * tiles, begin / abi::kKvTile, (end - 1) / abi::kKvTile + 1};
}

// Sequences that a command ahead unpacks lie one behind the other in its tiles, and end before the
// one that this returns; 0: none is. They are the first ones that have room for all their keys, if
// that pays. If all multiprocessors have work, unpacking a key costs what 11 / 3 work tiles gain by
// it. If few heads have work, the longest walk takes the time, and it always pays. A row has the
// same bits either way. For all threads together.
inline uint64_t find_unpacked_end(const abi::AttentionParams& p, const Args& args,
                                  uint32_t tile_rows, uint32_t stage_keys, uint64_t* of_warps) {
  constexpr uint64_t kFewHeads = 36;
  if (p.unpacked_work == 0) return p.unpacked_room + 1;
  uint64_t all = 0, tiles = 0, walked = 0, work_tiles = 0, heads = 0;
  for (uint64_t base = 0; base < p.table.sequences; base += blockDim.x) {
    const uint64_t sequence = base + threadIdx.x;
    const uint64_t count = sequence_span(p, args, sequence, stage_keys).count;
    const uint64_t rows = sequence_tokens(p, args, sequence) * p.group,
                   row_tiles = divide(rows + tile_rows - 1, tile_rows);
    uint64_t sum = 0;
    const uint64_t end = all + scan_block(count, of_warps, sum) + count;
    all += sum;
    const bool fits = count != 0 && end <= p.unpacked_room;
    const auto add = [&](uint64_t& to, uint64_t value) {
      scan_block(fits ? value : 0, of_warps, sum);
      to += sum;
    };
    add(tiles, count), add(walked, count * row_tiles);
    add(work_tiles, row_tiles * p.kv_heads), add(heads, p.kv_heads);
  }
  const bool pays = heads <= kFewHeads || 3 * walked >= 11 * tiles;
  return pays && (tiles == all || work_tiles >= p.unpacked_work) ? tiles + 1 : 0;
}

// What a command over pages takes: all sequences of its phase, those that another one has unpacked,
// or the others.
enum class BatchPart { all, unpacked, others };

// The sequence that has work tile `index`; how many tiles there are at all. `of_warps`: a word for
// each warp, in shared memory. For all threads together.
template <BatchPart kPart = BatchPart::all>
inline void find_batch_tile(RowTile& problem, const Args& args, uint64_t* of_warps) {
  const abi::AttentionParams& p = problem.params;
  const RowTile::OfSequence& now = problem.of_sequence;
  const uint64_t wanted = problem.index;
  // A sequence has many tiles, and they are counted once.
  if (wanted - now.begin < now.count || wanted >= problem.count) return;
  uint64_t before = 0, key_tiles = 0;
  for (uint64_t base = 0; base < p.table.sequences; base += blockDim.x) {
    uint64_t all = 0, all_keys = 0, place = 0;
    const uint64_t sequence = base + threadIdx.x;
    uint64_t tiles = sequence_tiles(problem, args, sequence) * p.kv_heads;
    if (kPart != BatchPart::all && p.unpacked_room != 0) {
      const SequenceSpan span = sequence_span(p, args, sequence, problem.stage_keys);
      place = key_tiles + scan_block(span.count, of_warps, all_keys);
      const bool is_unpacked = place + span.count < problem.unpacked_end;
      if (is_unpacked != (kPart == BatchPart::unpacked)) tiles = 0;
      place -= span.base;
      key_tiles += all_keys;
    }
    const uint64_t first = before + scan_block(tiles, of_warps, all);
    if (first <= wanted && wanted - first < tiles) {
      problem.sequence = sequence;
      problem.of_sequence = {.begin = first, .count = tiles};
      problem.unpacked_at = place;
    }
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

// What all work tiles of a sequence have in common.
inline void place_sequence(RowTile& problem, const Args& args) {
  using enum abi::AttentionArg;
  const abi::AttentionParams& p = problem.params;
  const abi::BatchSequence of = batch_sequence(p, args, problem.sequence);
  problem.of_sequence.rows = of.tokens * problem.group;
  problem.of_sequence.is_valid = of.valid ? 1 : 0;
  problem.first_token = of.first_token;
  problem.entries = pointer<const uint32_t>(args.at[arg_table]) +
                    problem.sequence * p.table.stride + p.table.first_entry;
  problem.split = 0;
  problem.first_key = 0, problem.last_key = static_cast<int64_t>(of.length);
  problem.mask = sequence_mask(p, args, of, problem.sequence);
}

// The rows and keys of the tile that find_batch_tile found. The last rows, which see the most keys,
// come first, of all heads in turn: a block takes every so many tiles, long ones and short ones.
// One thread.
inline void place_batch_tile(RowTile& problem, const Args& args) {
  RowTile::OfSequence& of = problem.of_sequence;
  if (of.rows == 0) place_sequence(problem, args);
  const uint64_t tiles = divide(of.rows + problem.tile_rows - 1, problem.tile_rows),
                 at = problem.index - of.begin, nth = divide(at, problem.params.kv_heads);
  problem.kv_head = at - nth * problem.params.kv_heads;
  problem.first_row = (tiles - 1 - nth) * problem.tile_rows;
  problem.rows =
      static_cast<uint32_t>(abi::kv_least(of.rows - problem.first_row, problem.tile_rows));
  problem.invalid = of.is_valid ^ 1;
  place_head(problem, args);
  place_page_walk(problem);
}

}  // namespace gyre::cuda
