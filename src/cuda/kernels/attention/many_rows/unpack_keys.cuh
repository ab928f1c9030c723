#pragma once
// Attention of many rows: the command that unpacks K and V ahead of the one that attends, once for
// all rows. Bytes moved: codes and scales once in, 16 bits for each coordinate out. A block takes
// some tiles of a KV head at a time; all of their codes are asked for before the first is used.
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/row_tile_batch.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/unpacked_walk.cuh"

namespace gyre::cuda {

constexpr uint32_t kUnpackKeys = kUnpackTiles * 8;
static_assert(kUnpackThreads == 2 * kUnpackKeys);  // a scale of K or V each

// Where a tile of the operands comes from: a tile of the cache, or of a page `offset` bytes on. Of
// entries that are no page, the keys have a multiplier that is NaN.
struct UnpackSource {
  uint64_t offset;
  uint32_t tile;
  uint16_t is_there, is_page;
};

// Tiles that a block unpacks, in turn.
struct UnpackRange {
  int64_t first, end, step;
};

struct UnpackState {
  abi::AttentionParams params;
  UnpackedWalk all;  // without pages
  // Over pages, of the sequence at hand: its tiles, where they begin, its part of the table.
  SequenceSpan span;
  uint64_t place;
  const uint32_t* entries;
  UnpackRange range;
  UnpackedTiles to;                   // of the KV head's first tile
  uint64_t k, v, k_scales, v_scales;  // of the KV head
  uint64_t of_warps[kUnpackThreads / kWarp];
  // Sources of two groups of tiles in turn, and what levels are multiplied by, as f16.
  UnpackSource sources[2][kUnpackTiles];
  uint32_t k_factors[2][kUnpackKeys];  // in both halves of a word
  alignas(16) uint16_t v_factors[2][kUnpackKeys];

  bool paged() const { return params.table.page_tokens != 0; }
  // Where tile `at` of the operands comes from.
  UnpackSource source(int64_t at) const {
    if (!paged()) {
      const auto nth = static_cast<uint64_t>(at);
      const bool is_there = nth < all.walk.tiles;
      return {0, is_there ? static_cast<uint32_t>(all.walk.tile(nth)) : 0, is_there, 1};
    }
    const uint64_t nth = static_cast<uint64_t>(at) - place + span.base;
    if (nth < span.first || nth >= span.end) return {0, 0, 0, 1};
    bool is_page = true;
    const RowTile::TileAt of = page_tile_at(params.table, entries, nth, is_page);
    return {of.offset, static_cast<uint32_t>(of.tile), 1, is_page};
  }
};
static_assert(sizeof(UnpackState) <= kUnpackBytes);

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim>
class Unpacker {
 public:
  Unpacker(UnpackState& state, const abi::AttentionParams& p)
      : state_(state),
        k_stride_(static_cast<uint32_t>(p.k.codes_tile_stride)),
        v_stride_(static_cast<uint32_t>(p.v.codes_tile_stride)),
        k_(state.k),
        v_(state.v),
        of_v_(threadIdx.x / kUnpackKeys != 0) {
    const uint32_t key = threadIdx.x % kUnpackKeys;
    scale_stride_ = static_cast<uint32_t>(of_v_ ? p.v.scales_tile_stride : p.k.scales_tile_stride);
    scales_ = (of_v_ ? state.v_scales : state.k_scales) + key % 8 * 2;
    multipliers_ = (of_v_ ? state.to.v_multipliers : state.to.k_multipliers) + key * 2;
    to_k_ = state.to.k + threadIdx.x * 16;
    to_v_ = state.to.v + (threadIdx.x / kValueUnits * 8 * kValueUnits + value_unit()) * 16;
  }

  // The tiles of a range; all threads.
  void run(const UnpackRange& range) {
    if (range.first >= range.end) return;
    __syncthreads();  // nobody reads the sources of another range
    find_sources(range.first, 0);
    __syncthreads();
    uint32_t turn = 0;
#pragma unroll 1
    for (int64_t first = range.first; first < range.end; first += range.step, ++turn)
      run(first, first + range.step < range.end ? first + range.step : first, turn % 2);
  }

 private:
  // Tiles from `first` on; `next` are found meanwhile.
  void run(int64_t first, int64_t next, uint32_t turn) {
    const UnpackSource* const sources = state_.sources[turn];
    KeyWords<kK> keys[kKeyCount];
#pragma unroll
    for (uint32_t i = 0; i < kKeyCount; ++i) {
      const UnpackSource of = sources[key_row(i) / 8];
      keys[i].low = keys[i].next = keys[i].high = 0;
      if (of.is_there != 0)
        keys[i] = {reinterpret_cast<const uint8_t*>(k_ + of.offset + uint64_t{of.tile} * k_stride_ +
                                                    key_row(i) % 8 * kRowBytes),
                   kKDim, key_chunk() / 4, key_chunk() % 4};
    }
    ValuePair<kV> values[kValueCount][4];
#pragma unroll
    for (uint32_t i = 0; i < kValueCount; ++i) {
      const UnpackSource of = sources[value_tile(i) % kUnpackTiles];
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const uint32_t coordinate = value_unit() * 8 + 2 * e;
        values[i][e] = {};
        if (of.is_there != 0)
          values[i][e] = {
              reinterpret_cast<const uint8_t*>(v_ + of.offset + uint64_t{of.tile} * v_stride_),
              kVDim, coordinate, coordinate + 1};
      }
    }
    hand_over_scale(first, turn);
    find_sources(next, turn ^ 1);
    __syncthreads();
    write_keys(state_.k_factors[turn], keys, to_k_ + first * kKDim * 16);
    write_values(state_.v_factors[turn], values, to_v_ + first * kVDim * 16);
  }

  void find_sources(int64_t first, uint32_t turn) {
    const uint32_t thread = threadIdx.x;
    if (thread < kUnpackTiles)
      state_.sources[turn][thread] = state_.source(first + static_cast<int64_t>(thread));
  }

  static constexpr uint32_t kUnits = kKDim / 8, kValueUnits = kVDim / 8,
                            kRowBytes = kKDim * abi::kv_bits(kK) / 8,
                            kKeyStep = kUnpackThreads / kUnits,
                            kValueStep = kUnpackThreads / kValueUnits,
                            kKeyCount = kUnpackKeys / kKeyStep,
                            kValueCount = kValueStep < kUnpackTiles ? kUnpackTiles / kValueStep : 1;
  static_assert(kUnpackThreads % kUnits == 0 && kUnpackThreads % kValueUnits == 0);

  static uint32_t key_chunk() { return threadIdx.x % kUnits; }
  static uint32_t key_row(uint32_t i) { return threadIdx.x / kUnits + i * kKeyStep; }
  static uint32_t value_unit() { return threadIdx.x % kValueUnits; }
  static uint32_t value_tile(uint32_t i) { return threadIdx.x / kValueUnits + i * kValueStep; }

  // What the levels of the thread's key of K or V are multiplied by, and its multiplier.
  void hand_over_scale(int64_t first, uint32_t turn) const {
    constexpr uint32_t kNaN = 0xFFFF;
    const uint32_t key = threadIdx.x % kUnpackKeys;
    const UnpackSource of = state_.sources[turn][key / 8];
    uint32_t stored = 0;
    if (of.is_there != 0)
      stored = load_bits(scales_ + of.offset + uint64_t{of.tile} * scale_stride_, 0, false);
    const OperandScale scale = operand_scale(of.is_page != 0 ? stored : kNaN);
    if (of_v_) {
      state_.v_factors[turn][key] = static_cast<uint16_t>(scale.f16);
    } else {
      state_.k_factors[turn][key] = scale.f16 * 0x10001u;
    }
    *pointer<uint16_t>(multipliers_ + first * kScaleTileBytes) =
        static_cast<uint16_t>(scale.multiplier);
  }

  static void write_keys(const uint32_t* factors, const KeyWords<kK> (&keys)[kKeyCount],
                         uint64_t to) {
    const LevelTable table = level_table<kK, true>();
#pragma unroll
    for (uint32_t i = 0; i < kKeyCount; ++i)
      pointer<uint4>(to)[i * kUnpackThreads] = scaled_chunk(
          level_chunk<kK>(keys[i].operands(table, key_chunk() / 4)), factors[key_row(i)]);
  }
  // Eight coordinates of eight keys: unpacked with keys inside, written with coordinates inside.
  static void write_values(const uint16_t* factors, const ValuePair<kV> (&values)[kValueCount][4],
                           uint64_t to) {
    const LevelTable table = level_table<kV, true>();
#pragma unroll
    for (uint32_t i = 0; i < kValueCount; ++i) {
      if (kValueStep > kUnpackTiles && value_tile(i) >= kUnpackTiles) continue;
      const uint4 scales = *reinterpret_cast<const uint4*>(factors + value_tile(i) * 8);
      uint32_t rows[8][4];  // of keys, pairs of coordinates
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        Operands<1> x[2];
        unpack_values<kV, true>(table, values[i][e].low, values[i][e].high, 0, x);
        const uint4 a = scaled_chunk(level_chunk<kV>(x[0]), scales),
                    b = scaled_chunk(level_chunk<kV>(x[1]), scales);
        const uint32_t of_a[4] = {a.x, a.y, a.z, a.w}, of_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          rows[2 * k][e] = permute(of_a[k], of_b[k], 0x5410);
          rows[2 * k + 1][e] = permute(of_a[k], of_b[k], 0x7632);
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < 8; ++k)
        pointer<uint4>(to)[(i * kValueStep * 8 + k) * kValueUnits] =
            make_uint4(rows[k][0], rows[k][1], rows[k][2], rows[k][3]);
    }
  }

  UnpackState& state_;
  const uint32_t k_stride_, v_stride_;
  const uint64_t k_, v_;
  const bool of_v_;
  uint32_t scale_stride_;
  uint64_t scales_, multipliers_, to_k_, to_v_;
};

// Finds the sequence that tile `wanted` of the operands is of. All threads.
inline void find_unpacked_sequence(UnpackState& state, const Args& args, uint64_t wanted,
                                   uint32_t stage_keys) {
  const abi::AttentionParams& p = state.params;
  uint64_t before = 0;
  for (uint64_t base = 0; base < p.table.sequences && before <= wanted; base += blockDim.x) {
    const uint64_t sequence = base + threadIdx.x;
    const SequenceSpan span = sequence_span(p, args, sequence, stage_keys);
    uint64_t all = 0;
    const uint64_t place = before + scan_block(span.count, state.of_warps, all);
    if (place <= wanted && wanted - place < span.count) {
      state.span = span, state.place = place;
      state.entries = pointer<const uint32_t>(args.at[abi::arg_table]) + sequence * p.table.stride +
                      p.table.first_entry;
    }
    before += all;
  }
  __syncthreads();
}

// Tiles of the sequences that are unpacked. All threads.
inline uint64_t unpacked_batch_tiles(UnpackState& state, const Args& args,
                                     const ManyRowsLayout& layout) {
  const abi::AttentionParams& p = state.params;
  const uint64_t end = find_unpacked_end(p, args, layout.rows(), layout.keys, state.of_warps);
  if (p.unpacked_work != 0) return end == 0 ? 0 : end - 1;
  uint64_t tiles = 0;
  for (uint64_t base = 0; base < p.table.sequences; base += blockDim.x) {
    uint64_t all = 0;
    scan_block(sequence_span(p, args, base + threadIdx.x, layout.keys).count, state.of_warps, all);
    tiles += all;
  }
  return abi::kv_least(tiles, p.unpacked_room);
}

// Over pages, each block takes as many tiles that lie one behind the other.
template <class Unpack>
inline void unpack_pages(UnpackState& state, const Args& args, const ManyRowsLayout& layout,
                         Unpack& unpack) {
  const uint64_t tiles = unpacked_batch_tiles(state, args, layout);
  const uint64_t groups = divide(tiles, kUnpackTiles),
                 each = divide(groups + gridDim.x - 1, gridDim.x),
                 last = abi::kv_least((blockIdx.x + 1) * each, groups);
  uint64_t group = blockIdx.x * each;
#pragma unroll 1
  while (group < last) {
    find_unpacked_sequence(state, args, group * kUnpackTiles, layout.keys);
    const uint64_t end = abi::kv_least(divide(state.place + state.span.count, kUnpackTiles), last);
    unpack.run({static_cast<int64_t>(group * kUnpackTiles),
                static_cast<int64_t>(end * kUnpackTiles), kUnpackTiles});
    group = end;
    __syncthreads();
  }
}

// A KV head for each row of the grid.
template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim>
__global__ void __launch_bounds__(kUnpackThreads)
    attention_many_rows_unpack(const abi::AttentionParams params, const Args args) {
  constexpr ManyRowsLayout kLayout = many_rows_layout(kK, kV, kKDim, kVDim, kManyRowsUnpacked);
  constexpr uint32_t kStageKeys = kLayout.keys;
  static_assert(kStageKeys / abi::kKvTile % kUnpackTiles == 0);  // a group is of one sequence
  UnpackState& state = *reinterpret_cast<UnpackState*>(dynamic_shared());
  const bool paged = params.table.page_tokens != 0;
  if (threadIdx.x == 0) {
    using enum abi::AttentionArg;
    const uint64_t head = blockIdx.y;
    state.params = params;
    if (const uint64_t at = args.at[arg_state]; !paged && at != 0) {
      pdl_wait();
      abi::attention_follow(*pointer<const abi::KvState>(at), state.params);
    }
    state.k = args.at[arg_k_codes] + head * params.k.codes_head_stride;
    state.v = args.at[arg_v_codes] + head * params.v.codes_head_stride;
    state.k_scales = args.at[arg_k_scales] + head * params.k.scales_head_stride;
    state.v_scales = args.at[arg_v_scales] + head * params.v.scales_head_stride;
    state.to = unpacked_tiles_at(params, args.at[arg_partial], head, 0, kStageKeys);
    if (!paged) {
      state.all = {state.params, kStageKeys};
      const auto tiles = static_cast<int64_t>(state.all.walk.tiles);
      const int64_t front = state.all.in_front ? unpacked_front(kStageKeys) : 0;
      state.range = {int64_t{blockIdx.x} * kUnpackTiles - front,
                     tiles == 0 ? 0 : tiles + kStageKeys / abi::kKvTile,
                     int64_t{gridDim.x} * kUnpackTiles};
    }
  }
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
  Unpacker<kK, kV, kKDim, kVDim> unpacker(state, params);
  if (paged) {
    unpack_pages(state, args, kLayout, unpacker);
  } else {
    unpacker.run(state.range);
  }
}

}  // namespace gyre::cuda
