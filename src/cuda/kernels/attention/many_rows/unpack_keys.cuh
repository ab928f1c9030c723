#pragma once
// Attention of many rows: the command that unpacks K and V ahead of the one that attends, once for
// all rows. Bytes moved: codes and scales once in, 16 bits for each coordinate out. A block takes
// some tiles of a KV head at a time.
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/value_pair.cuh"
#include "cuda/kernels/attention/many_rows/layout.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/unpacked_walk.cuh"

namespace gyre::cuda {

constexpr uint32_t kUnpackKeys = kUnpackTiles * 8;

struct UnpackState {
  abi::AttentionParams params;
  uint64_t k_codes, stored_k_scales, v_codes, stored_v_scales, partial;
  UnpackedWalk all;
  uint64_t front, groups;  // tiles in front of the first key's, groups of tiles of a KV head
  uint32_t k_scales[kUnpackKeys];  // f16, twice
  alignas(16) uint16_t v_scales[kUnpackKeys];
};
static_assert(sizeof(UnpackState) <= kUnpackBytes);

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim, uint32_t kStageKeys>
class Unpacker {
 public:
  explicit Unpacker(UnpackState& state) : state_(state) {}

  // The index-th group of tiles; all threads.
  void run(uint64_t index) {
    const abi::AttentionParams& p = state_.params;
    const uint64_t head = divide(index, state_.groups);
    first_ = static_cast<int64_t>((index - head * state_.groups) * kUnpackTiles) -
             static_cast<int64_t>(state_.front);
    to_ = unpacked_tiles_at(p, state_.partial, head, first_, kStageKeys);
    const uint64_t k = state_.k_codes + head * p.k.codes_head_stride,
                   v = state_.v_codes + head * p.v.codes_head_stride;
    // All loads ahead of what waits for them.
    KeyWords<kK> keys[kKeyCount];
#pragma unroll
    for (uint32_t i = 0; i < kKeyCount; ++i) {
      const uint32_t row = key_row(i);
      keys[i].low = keys[i].next = keys[i].high = 0;
      if (present(row / 8))
        keys[i] = {
            pointer<const uint8_t>(k + tile(row / 8) * p.k.codes_tile_stride) + row % 8 * kRowBytes,
            kKDim, key_chunk() / 4, key_chunk() % 4};
    }
    ValuePair<kV> values[kValueCount];
#pragma unroll
    for (uint32_t i = 0; i < kValueCount; ++i) {
      const uint32_t nth = value_tile(i);
      values[i] = {};
      if (present(nth))
        values[i] = {pointer<const uint8_t>(v + tile(nth) * p.v.codes_tile_stride), kVDim,
                     coordinate(), coordinate() + kHalf};
    }
    if (threadIdx.x < 2 * kUnpackKeys) hand_over_scale(head, threadIdx.x / kUnpackKeys != 0);
    __syncthreads();
    write_keys(keys);
    write_values(values);
    __syncthreads();  // scales are read
  }

 private:
  static constexpr uint32_t kUnits = kKDim / 8, kHalf = kVDim / 2,
                            kRowBytes = kKDim * abi::kv_bits(kK) / 8,
                            kKeyStep = kUnpackThreads / kUnits, kValueStep = kUnpackThreads / kHalf,
                            kKeyCount = kUnpackKeys / kKeyStep,
                            kValueCount = kUnpackTiles / kValueStep;
  static_assert(kUnpackThreads % kUnits == 0 && kUnpackThreads % kHalf == 0);

  static uint32_t key_chunk() { return threadIdx.x % kUnits; }
  static uint32_t key_row(uint32_t i) { return threadIdx.x / kUnits + i * kKeyStep; }
  static uint32_t coordinate() { return threadIdx.x % kHalf; }
  static uint32_t value_tile(uint32_t i) { return threadIdx.x / kHalf + i * kValueStep; }
  // Whether the cache has a tile for a tile of the group, and which.
  bool present(uint32_t nth) const {
    const int64_t at = first_ + nth;
    return at >= 0 && at < static_cast<int64_t>(state_.all.walk.tiles);
  }
  uint64_t tile(uint32_t nth) const {
    return state_.all.walk.tile(static_cast<uint64_t>(first_ + nth));
  }

  // A thread's key of the group: what its levels are multiplied by, and its multiplier.
  void hand_over_scale(uint64_t head, bool of_v) {
    const abi::AttentionParams& p = state_.params;
    const abi::KvCacheLayout& cache = of_v ? p.v : p.k;
    const uint32_t key = threadIdx.x % kUnpackKeys;
    uint32_t stored = 0;
    if (present(key / 8))
      stored =
          load_bits((of_v ? state_.stored_v_scales : state_.stored_k_scales) +
                        head * cache.scales_head_stride + tile(key / 8) * cache.scales_tile_stride,
                    key % 8, false);
    const OperandScale scale = operand_scale(stored);
    if (of_v) {
      state_.v_scales[key] = static_cast<uint16_t>(scale.f16);
    } else {
      state_.k_scales[key] = scale.f16 * 0x10001u;
    }
    pointer<uint16_t>(of_v ? to_.v_multipliers : to_.k_multipliers)[key] =
        static_cast<uint16_t>(scale.multiplier);
  }

  void write_keys(const KeyWords<kK> (&keys)[kKeyCount]) const {
    const LevelTable table = level_table<kK, true>();
#pragma unroll
    for (uint32_t i = 0; i < kKeyCount; ++i) {
      const uint32_t row = key_row(i);
      pointer<uint4>(to_.k)[row * kUnits + key_chunk()] = scaled_chunk(
          level_chunk<kK>(keys[i].operands(table, key_chunk() / 4)), state_.k_scales[row]);
    }
  }
  void write_values(const ValuePair<kV> (&values)[kValueCount]) const {
    const LevelTable table = level_table<kV, true>();
#pragma unroll
    for (uint32_t i = 0; i < kValueCount; ++i) {
      const uint32_t nth = value_tile(i);
      Operands<1> x[2];
      unpack_values<kV, true>(table, values[i].low, values[i].high, 0, x);
      const uint4 scales = *reinterpret_cast<const uint4*>(state_.v_scales + nth * 8);
      uint4* const to = pointer<uint4>(to_.v) + nth * kVDim + coordinate();
      to[0] = scaled_chunk(level_chunk<kV>(x[0]), scales);
      to[kHalf] = scaled_chunk(level_chunk<kV>(x[1]), scales);
    }
  }

  UnpackState& state_;
  int64_t first_ = 0;
  UnpackedTiles to_ = {};
};

template <uint32_t kK, uint32_t kV, uint32_t kKDim, uint32_t kVDim>
__global__ void __launch_bounds__(kUnpackThreads)
    attention_many_rows_unpack(const abi::AttentionParams params, const Args args) {
  constexpr uint32_t kStageKeys = many_rows_layout(kK, kV, kKDim, kVDim, kManyRowsUnpacked).keys;
  pdl_wait();
  pdl_launch_dependents();
  UnpackState& state = *reinterpret_cast<UnpackState*>(dynamic_shared());
  if (threadIdx.x == 0) {
    using enum abi::AttentionArg;
    state.params = params;
    state.k_codes = args.at[arg_k_codes], state.stored_k_scales = args.at[arg_k_scales];
    state.v_codes = args.at[arg_v_codes], state.stored_v_scales = args.at[arg_v_scales];
    state.partial = args.at[arg_partial];
    if (const uint64_t at = args.at[arg_state]; at != 0)
      abi::attention_follow(*pointer<const abi::KvState>(at), state.params);
    state.all = {state.params, kStageKeys};
    const uint64_t tiles = state.all.walk.tiles;
    state.front = state.all.in_front ? unpacked_front(kStageKeys) : 0;
    state.groups = tiles == 0
                       ? 0
                       : divide(state.front + tiles + kStageKeys / abi::kKvTile + kUnpackTiles - 1,
                                kUnpackTiles);
  }
  __syncthreads();
  Unpacker<kK, kV, kKDim, kVDim, kStageKeys> unpacker(state);
  for (uint64_t i = blockIdx.x; i < state.groups * params.kv_heads; i += gridDim.x) unpacker.run(i);
}

}  // namespace gyre::cuda
