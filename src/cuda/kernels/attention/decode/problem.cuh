#pragma once
// Decode attention: the constants of a kernel variant, and what a block works on. Rows of a KV head
// are its (token, query head) pairs, the head running fastest; masks become bounds.
#include "abi/attention.h"
#include "abi/attention_bounds.h"
#include "abi/kv_walk.h"
#include "cuda/kernels/attention/common/unpack.cuh"
#include "cuda/kernels/attention/decode/decode_layout.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"
#include "cuda/kernels/warp.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

template <uint32_t kFormatK, uint32_t kFormatV, uint32_t kHeadDim, uint32_t kRowCount,
          uint32_t kClusterSize, uint32_t kHeadDimV>
struct DecodeTraits {
  static constexpr uint32_t kK = kFormatK, kV = kFormatV, kRows = kRowCount;
  static constexpr uint32_t kCluster = kClusterSize;
  static constexpr HeadDims kDims = {kHeadDim, kHeadDimV};
  static constexpr uint32_t kKeyDim = kDims.k, kValueDim = kDims.v;
  static constexpr uint32_t kQueryDim = round_up(kKeyDim, kWarp);  // floats of a staged query
  static constexpr uint32_t kRowDim = decode_row_dim(kValueDim);   // see decode_row_dim
  static constexpr uint32_t kWarpsPerKey = decode_warps_per_key(kDims);
  // Coordinates of a key, of a value and of a row of sums in one warp.
  static constexpr uint32_t kKeySlice = decode_slice_dim(kKeyDim);
  static constexpr uint32_t kValueSlice = decode_slice_dim(kValueDim);
  static constexpr uint32_t kRowSlice = kRowDim / kWarpsPerKey;
  static constexpr DecodeStage kStage = decode_stage(kK, kV, kDims, kRows, kCluster);
  static constexpr DecodeSharedLayout kLayout =
      decode_shared_layout(kK, kV, kDims, kRows, kCluster);
  static constexpr uint32_t kMaxWarps = decode_max_warps(kK, kV, kDims, kRows, kCluster);
  static constexpr uint32_t kStages = decode_stages(kLayout, kMaxWarps);
  static constexpr uint32_t kRingBytes = kLayout.ring_bytes(kStages);
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  static constexpr bool kManyRows = kRows > 4;  // see LevelForm
  using FormV = LevelForm<kV, kManyRows>;
  // Over pages, 128 registers of sums leave few for addresses: they are computed for each stage.
  static constexpr bool kFewRegisters =
      kCluster == kDecodePages && kLevelsV && kRows * kValueSlice > 1024;
  // Whether registers are enough to pin the addresses of loads and scales.
  static constexpr bool kPinAddresses =
      kRows < 16 && kStage.v[0].bytes + kStage.v[1].bytes < 8192 && !kFewRegisters;
  static constexpr uint32_t kTiles = kStage.tiles;
  // Scale blocks of a key and of a value, and those of a value that one warp has coordinates of.
  static constexpr uint32_t kBlocksK = kStage.k_blocks, kBlocksV = kStage.v_blocks;
  static constexpr uint32_t kWarpBlocksV = kWarpsPerKey == 1 && kLevelsV ? kBlocksV : 1;
  // Parts of a query and of a finished row, a warp for each.
  static constexpr uint32_t kQueryParts = kLevelsK && kKeyDim > 256 ? kKeyDim / 256 : 1;
  static constexpr uint32_t kRowParts = kRowDim > 256 ? kRowDim / 256 : 1;
  static_assert(kStage.fits);

  // Keys come in the order in which the MMA over V takes them. Of levels, a lane has kAdjacentKeys
  // neighbouring keys of each MMA. Rows are stored so that lanes g and g + 1 read different banks.
  static constexpr uint32_t kMmas = kStage.keys == 64 ? 2 : 1;
  static constexpr uint32_t kLaneKeys = kStage.keys / 8, kAdjacentKeys = kLaneKeys / kMmas;
  static constexpr bool kInterleavedV = kLevelsV && value_token<kV>(1) != 1;
  static constexpr uint32_t kSlotRotations =
      (kLevelsK ? (kLevelsV ? 1 : 2) : 0) + (kInterleavedV ? 1 : 0);
  static constexpr uint32_t first_row(uint32_t g) {
    return kAdjacentKeys == 4 ? g / 2 * 8 + g % 2 : g / 4 * 8 + g % 4;
  }
  // Bytes of a plane from a lane's first key to its key i.
  static constexpr uint32_t key_distance(const DecodePlane& plane, uint32_t i) {
    return i / kAdjacentKeys * 4 * plane.tile_pitch +
           i % kAdjacentKeys * (8 / kAdjacentKeys) * plane.bytes;
  }
  // Tiles of K as they are stored have tokens in their places.
  static constexpr uint32_t first_token(uint32_t g) {
    if (kAdjacentKeys == 2) return g / 4 * 8 + g % 4 * 2;
    return g / 2 * 8 + g % 2 * (kInterleavedV ? 2 : 4);
  }
  static constexpr uint32_t token_distance(uint32_t i) {
    const uint32_t inside = i % kAdjacentKeys;
    return kInterleavedV ? inside % 2 * 4 + inside / 2 : inside;
  }
  // Position in the stage of the key that comes `at`-th in the order of the MMA.
  static constexpr uint32_t key(uint32_t at) {
    if constexpr (kLevelsV) return at / 8 * 8 + value_token<kV>(at % 8);
    return at;
  }
};

// How rows and keys are spread over a warp's lanes. MMAs with levels leave rows 4 i + j and
// neighbouring keys in a lane, those with 16-bit floats rows 8 i + g and keys 8 t + 2 j, + 1.
template <class Traits, bool kLevels>
struct Spread {
  static constexpr uint32_t kCount = Traits::kRows / 4, kKeys = Traits::kLaneKeys;
  using Scores = float[kCount][kKeys];
  static uint32_t row(uint32_t i) { return 4 * i + threadIdx.x % 4; }
  static uint32_t key(uint32_t i) {
    constexpr uint32_t kAdjacent = Traits::kAdjacentKeys;
    return i / kAdjacent * 32 + threadIdx.x % kWarp / 4 * kAdjacent + i % kAdjacent;
  }
  static float& at(Scores& x, uint32_t row, uint32_t key) { return x[row][key]; }
};
template <class Traits>
struct Spread<Traits, false> {
  static constexpr uint32_t kCount = row_tiles(Traits::kRows), kKeys = Traits::kTiles * 2;
  using Scores = float[kCount][Traits::kTiles][2];
  static uint32_t row(uint32_t i) { return 8 * i + threadIdx.x % kWarp / 4; }
  static uint32_t key(uint32_t i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static float& at(Scores& x, uint32_t row, uint32_t key) { return x[row][key / 2][key % 2]; }
};
template <class Traits>
using SpreadK = Spread<Traits, Traits::kLevelsK>;
template <class Traits>
using SpreadV = Spread<Traits, Traits::kLevelsV>;

// Read from one lane: the compiler then knows that the number is warp-uniform.
inline uint32_t warp_index() { return __shfl_sync(kAll, threadIdx.x / kWarp, 0); }

using DecodeWalk = abi::KvWalk<uint32_t>;
using DecodeBounds = abi::RowBounds<int32_t>;

// Keys that all rows see, of those that some row sees. Bounds grow with the token: the first
// token's begin and the last one's end contain all.
struct CommonKeys {
  uint32_t all;            // 1: they are the same
  uint32_t first, starts;  // else a whole stage of them begins at so many keys from `first` on

  static CommonKeys of(const DecodeBounds& oldest, const DecodeBounds& newest,
                       uint32_t stage_keys) {
    const int32_t keys = oldest.end - newest.begin, stage = static_cast<int32_t>(stage_keys);
    return {oldest.begin == newest.begin && oldest.end == newest.end ? 1u : 0u,
            static_cast<uint32_t>(newest.begin - oldest.begin),
            keys < stage ? 0 : static_cast<uint32_t>(keys - stage + 1)};
  }
};

// Every thread of a block has the same numbers.
struct DecodeProblem {
  uint32_t kv_head, group;
  uint32_t first_row, rows;    // of the KV head's rows; further ones are other blocks'
  abi::RowMask<int32_t> mask;  // length, tokens, window, causal
  uint32_t first;              // oldest key of the split that one of the rows sees
  uint32_t splits;             // that have keys
  CommonKeys common;           // of the split
  bool plain_logits;           // no soft cap, no slopes
  DecodeWalk walk;
  uint32_t walk_first;  // of the walk's keys, counted from `first`

  // Whether all rows see all keys of the stage at a position, if the stage is a whole one.
  bool seen_by_all(uint32_t begin) const {
    return common.all || walk.key_at(begin) - common.first < common.starts;
  }
  // Clusters of the KV head that have keys.
  template <uint32_t kCluster>
  uint32_t clusters() const {
    return (splits + kCluster - 1) / kCluster;
  }
};

// Rows come first: loads of the queries are issued before the keys are known.
inline DecodeProblem decode_rows(const abi::AttentionParams& p, uint32_t max_rows) {
  DecodeProblem problem = {};
  problem.kv_head = blockIdx.z;
  problem.mask.tokens = static_cast<int32_t>(p.tokens);
  problem.group = p.group;
  problem.first_row = blockIdx.y * max_rows;
  const uint32_t left = static_cast<uint32_t>(p.tokens) * problem.group - problem.first_row;
  problem.rows = left < max_rows ? left : max_rows;
  return problem;
}

// Keys [begin, end) of the cache that some query sees, and how many of them a split has.
struct SplitKeys {
  uint32_t begin, end, each;
};

inline SplitKeys split_keys(const abi::AttentionParams& p, uint64_t state, uint32_t splits,
                            DecodeProblem& problem) {
  const auto narrow = [](uint64_t x) { return static_cast<uint32_t>(x); };
  problem.mask.length = static_cast<int32_t>(p.length);
  problem.splits = p.used_splits;
  if (state == 0) return {narrow(p.first_key), narrow(p.end_key), narrow(p.split_keys)};
  pdl_wait();
  const abi::KvState now = *pointer<const abi::KvState>(state);
  const abi::KvKeys seen = abi::attention_keys(now, p);
  problem.mask.length = static_cast<int32_t>(now.length);
  abi::fill_segment(problem.mask, p.segment, p.places, now.tail_begin);
  // As attention_split_keys, in 32 bits: a 64-bit division takes ten times as long.
  const uint32_t keys = narrow(seen.end) - narrow(seen.begin);
  const uint32_t part = (keys + splits - 1) / splits, of = narrow(abi::kSplitMultiple);
  const uint32_t whole = (part + of - 1) / of * of;
  const uint32_t each = whole > p.fewest_split_keys ? whole : p.fewest_split_keys;
  problem.splits = keys == 0 ? 1 : (keys + each - 1) / each;
  return {narrow(seen.begin), narrow(seen.end), each};
}

struct HideFromOptimizer {
  uint32_t operator()(uint32_t x) const { return optimization_barrier(x); }
};

inline void decode_keys_of_split(const abi::AttentionParams& p, const Args& args,
                                 uint32_t stage_keys, DecodeProblem& problem) {
  const uint32_t split = blockIdx.x, splits = gridDim.x;
  problem.plain_logits = p.soft_cap == 0 && args.at[arg_alibi_slopes] == 0;
  const SplitKeys keys = split_keys(p, args.at[arg_state], splits, problem);
  const uint64_t begin = keys.begin + uint64_t{split} * keys.each;
  const uint32_t first = begin < keys.end ? static_cast<uint32_t>(begin) : keys.end;
  uint32_t last = keys.end;
  if (splits > 1 && keys.end - first > keys.each) last = first + keys.each;
  problem.mask.window = abi::row_window<int32_t>(p.window);
  problem.mask.causal = p.causal != 0;
  const auto low = static_cast<int32_t>(first), high = static_cast<int32_t>(last);
  const DecodeBounds oldest = abi::row_bounds<int32_t>(problem.mask, 0, low, high);
  const DecodeBounds newest =
      abi::row_bounds<int32_t>(problem.mask, problem.mask.tokens - 1, low, high);
  problem.common = CommonKeys::of(oldest, newest, stage_keys);
  problem.first = static_cast<uint32_t>(oldest.begin);
  const uint32_t count =
      newest.end > oldest.begin ? static_cast<uint32_t>(newest.end - oldest.begin) : 0;
  const auto capacity = static_cast<uint32_t>(p.capacity);
  const uint32_t slot = abi::kv_slot(static_cast<uint32_t>(p.ring_start) + problem.first, capacity);
  problem.walk = abi::kv_walk(capacity, slot, count, stage_keys, HideFromOptimizer());
}

struct RowPlace {
  uint32_t token, head;
};
inline RowPlace row_place(const DecodeProblem& problem, uint32_t r) {
  const uint32_t row = problem.first_row + r;
  const uint32_t token = problem.mask.tokens == 1 ? 0 : row / problem.group;
  return {token, problem.kv_head * problem.group + (row - token * problem.group)};
}

// What the mask needs of a row.
struct MaskRow {
  float slope, offset;  // offset: first key less the query's position
  uint32_t begin, end;  // keys it sees, counted from the split's first
};

inline MaskRow mask_row(const DecodeProblem& problem, uint64_t alibi_slopes, uint32_t r) {
  const RowPlace at = row_place(problem, r);
  const auto token = static_cast<int32_t>(at.token), first = static_cast<int32_t>(problem.first);
  const DecodeBounds b = abi::row_bounds(problem.mask, token, first, problem.mask.length);
  const int32_t position = abi::row_position(problem.mask, token);
  return {alibi_slopes == 0 ? 0.0f : pointer<const float>(alibi_slopes)[at.head],
          static_cast<float>(first - position), static_cast<uint32_t>(b.begin - first),
          static_cast<uint32_t>(b.end - first)};
}

// Addresses of a row's result, computed early: kernel parameters are slow to read at the end. A
// partial call writes {values, max, sum} [split][row] to `out`. In a merged call every cluster
// writes a partial: values [row][cluster], then {max, sum} [row][cluster]; rows are all of the
// call's.
struct RowTarget {
  uint64_t values, states, counter;  // of a merged call
  uint64_t out, lse, sink;           // 0: not wanted, or there is none
  uint32_t out_dtype;
};

// Bits that are never set, of an address that is a multiple of this many bytes, and of a walk over
// less than 2^31 slots: see decode.cu.
template <uint32_t kMultiple>
inline uint32_t never_set(const void* address) {
  const auto bits = reinterpret_cast<uint64_t>(address);
  return (static_cast<uint32_t>(bits) & (kMultiple - 1)) | static_cast<uint32_t>(bits >> 32) >> 24;
}
inline uint32_t never_set(const DecodeWalk& w) {
  return (w.first_tile | w.tiles_a | w.tiles | w.skip | w.end_a | w.end_b | w.starts_a |
          w.starts_b) >>
         31;
}

}  // namespace gyre::cuda
