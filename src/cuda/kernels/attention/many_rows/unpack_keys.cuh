#pragma once
// Attention of many rows: the command that unpacks K and V ahead of the one that attends, once for
// all rows. Bytes moved: codes and scales once in, 16 bits for each coordinate out. A block takes
// some tiles of a KV head at a time; all of their codes are asked for before the first is used.
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/unpacked_walk.cuh"

namespace gyre::cuda {

constexpr uint32_t kUnpackKeys = kUnpackTiles * 8;
static_assert(kUnpackThreads == 2 * kUnpackKeys);  // a scale of K or V each

struct UnpackState {
  abi::AttentionParams params;
  UnpackedWalk all;
  UnpackedTiles to;                   // of the KV head's first tile
  uint64_t k, v, k_scales, v_scales;  // of the KV head
  int32_t front, tiles;               // ahead of the first key's tile, and from there on
  // What levels are multiplied by, as f16, of two groups of tiles in turn.
  uint32_t k_factors[2][kUnpackKeys];  // in both halves of a word
  alignas(16) uint16_t v_factors[2][kUnpackKeys];
};
static_assert(sizeof(UnpackState) <= kUnpackBytes);

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim>
class Unpacker {
 public:
  Unpacker(const UnpackState& state, const abi::AttentionParams& p)
      : first_tile_(static_cast<uint32_t>(state.all.walk.first_tile)),
        tiles_a_(static_cast<uint32_t>(state.all.walk.tiles_a)),
        tiles_(static_cast<uint32_t>(state.all.walk.tiles)),
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

  // Tiles from `first` on, the `turn`-th time; all threads.
  void run(UnpackState& state, int32_t first, uint32_t turn) {
    KeyWords<kK> keys[kKeyCount];
#pragma unroll
    for (uint32_t i = 0; i < kKeyCount; ++i) {
      const int32_t at = first + static_cast<int32_t>(key_row(i) / 8);
      keys[i].low = keys[i].next = keys[i].high = 0;
      if (present(at))
        keys[i] = {reinterpret_cast<const uint8_t*>(k_ + uint64_t{tile(at)} * k_stride_ +
                                                    key_row(i) % 8 * kRowBytes),
                   kKDim, key_chunk() / 4, key_chunk() % 4};
    }
    ValuePair<kV> values[kValueCount][4];
#pragma unroll
    for (uint32_t i = 0; i < kValueCount; ++i) {
      const int32_t at = first + static_cast<int32_t>(value_tile(i));
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const uint32_t coordinate = value_unit() * 8 + 2 * e;
        values[i][e] = {};
        if (present(at))
          values[i][e] = {reinterpret_cast<const uint8_t*>(v_ + uint64_t{tile(at)} * v_stride_),
                          kVDim, coordinate, coordinate + 1};
      }
    }
    hand_over_scale(state, first, turn % 2);
    __syncthreads();
    const auto nth = static_cast<int64_t>(first);
    write_keys(state.k_factors[turn % 2], keys, to_k_ + nth * kKDim * 16);
    write_values(state.v_factors[turn % 2], values, to_v_ + nth * kVDim * 16);
  }

 private:
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
  // Whether the cache has a tile for a tile of the operands, and which.
  bool present(int32_t at) const { return static_cast<uint32_t>(at) < tiles_; }
  uint32_t tile(int32_t at) const {
    const auto nth = static_cast<uint32_t>(at);
    return nth < tiles_a_ ? first_tile_ + nth : nth - tiles_a_;
  }

  // What the levels of the thread's key of K or V are multiplied by, and its multiplier.
  void hand_over_scale(UnpackState& state, int32_t first, uint32_t turn) const {
    const uint32_t key = threadIdx.x % kUnpackKeys;
    const int32_t at = first + static_cast<int32_t>(key / 8);
    uint32_t stored = 0;
    if (present(at)) stored = load_bits(scales_ + uint64_t{tile(at)} * scale_stride_, 0, false);
    const OperandScale scale = operand_scale(stored);
    if (of_v_) {
      state.v_factors[turn][key] = static_cast<uint16_t>(scale.f16);
    } else {
      state.k_factors[turn][key] = scale.f16 * 0x10001u;
    }
    *pointer<uint16_t>(multipliers_ + static_cast<int64_t>(first) * kScaleTileBytes) =
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

  const uint32_t first_tile_, tiles_a_, tiles_, k_stride_, v_stride_;
  const uint64_t k_, v_;
  const bool of_v_;
  uint32_t scale_stride_;
  uint64_t scales_, multipliers_, to_k_, to_v_;
};

// A KV head for each row of the grid.
template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim>
__global__ void __launch_bounds__(kUnpackThreads)
    attention_many_rows_unpack(const abi::AttentionParams params, const Args args) {
  constexpr uint32_t kStageKeys = many_rows_layout(kK, kV, kKDim, kVDim, kManyRowsUnpacked).keys;
  UnpackState& state = *reinterpret_cast<UnpackState*>(dynamic_shared());
  if (threadIdx.x == 0) {
    using enum abi::AttentionArg;
    const uint64_t head = blockIdx.y;
    if (const uint64_t at = args.at[arg_state]; at != 0) {
      pdl_wait();
      state.params = params;
      abi::attention_follow(*pointer<const abi::KvState>(at), state.params);
      state.all = {state.params, kStageKeys};
    } else {
      state.all = {params, kStageKeys};
    }
    state.k = args.at[arg_k_codes] + head * params.k.codes_head_stride;
    state.v = args.at[arg_v_codes] + head * params.v.codes_head_stride;
    state.k_scales = args.at[arg_k_scales] + head * params.k.scales_head_stride;
    state.v_scales = args.at[arg_v_scales] + head * params.v.scales_head_stride;
    state.to = unpacked_tiles_at(params, args.at[arg_partial], head, 0, kStageKeys);
    const auto tiles = static_cast<int32_t>(state.all.walk.tiles);
    state.front = state.all.in_front ? static_cast<int32_t>(unpacked_front(kStageKeys)) : 0;
    state.tiles = tiles == 0 ? 0 : tiles + static_cast<int32_t>(kStageKeys / abi::kKvTile);
  }
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
  Unpacker<kK, kV, kKDim, kVDim> unpacker(state, params);
  uint32_t turn = 0;
  const int32_t tiles = state.tiles;
#pragma unroll 1
  for (int32_t first = static_cast<int32_t>(blockIdx.x * kUnpackTiles) - state.front; first < tiles;
       first += static_cast<int32_t>(gridDim.x * kUnpackTiles))
    unpacker.run(state, first, turn++);
}

}  // namespace gyre::cuda
