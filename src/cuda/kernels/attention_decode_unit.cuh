#pragma once
// Decode attention: what a block is to do, and its queries.
#include "attention_decode_copy.cuh"
#include "attention_decode_halves.cuh"
#include "attention_decode_values.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

template <uint32_t kKeys, uint32_t kValues, uint32_t kDim, uint32_t kRows, uint32_t kCluster>
struct Decode {
  static constexpr uint32_t kK = kKeys, kV = kValues, kN = kDim;
  static constexpr uint32_t kOwn = decode_own(kN), kParts = decode_parts(kN);  // of a warp, of keys
  static constexpr DecodeShape kShape = decode_shape(kK, kV, kN, kRows, kCluster);
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  static constexpr uint32_t kMostWarps = decode_most_warps(kK, kV, kN, kRows, kCluster);
  static constexpr bool kMany = kRows > 4;  // see LevelForm
  using FormV = LevelForm<kV, kMany>;
  // Registers are enough to keep where copies begin, and where scales lie.
  static constexpr bool kKeepsPlaces = kRows < 16 && kShape.v[0].bytes + kShape.v[1].bytes < 8192;
  static constexpr uint32_t kTiles = kShape.tiles, kBlocks = kShape.blocks;
  static constexpr uint32_t kQueryBlocks = kLevelsK ? kBlocks : 1;  // a warp each
  static_assert(kShape.fits);

  // Keys come in the order in which values are multiplied; of those in levels a lane has two or
  // four neighbouring ones of each product. Their rows lie so that what lanes g and g + 1 read at
  // once is in different banks.
  static constexpr uint32_t kProducts = kShape.keys == 64 ? 2 : 1;
  static constexpr uint32_t kLaneKeys = kShape.keys / 8, kTogether = kLaneKeys / kProducts;
  static constexpr bool kTurnedV = kLevelsV && value_item<kV>(1) != 1;
  static constexpr uint32_t kTurns = (kLevelsK ? (kLevelsV ? 1 : 2) : 0) + (kTurnedV ? 1 : 0);
  static constexpr uint32_t first_row(uint32_t g) {
    return kTogether == 4 ? g / 2 * 8 + g % 2 : g / 4 * 8 + g % 4;
  }
  // From there to a lane's key i, in bytes of a plane.
  static constexpr uint32_t key_distance(const DecodePlane& plane, uint32_t i) {
    return i / kTogether * 4 * plane.tile_pitch + i % kTogether * (8 / kTogether) * plane.bytes;
  }
  // The key that is `at` in that order.
  static constexpr uint32_t key(uint32_t at) {
    if constexpr (kLevelsV) return at / 8 * 8 + value_item<kV>(at % 8);
    return at;
  }
};

// From one lane, so that the compiler knows that lanes do not part.
inline uint32_t warp_number() { return __shfl_sync(kAll, threadIdx.x / kWarp, 0); }

// What a block is to do; the same in every thread.
struct DecodeUnit {
  uint32_t kv_head, group;
  uint32_t first_row, rows;  // of the KV head's; more are for other blocks
  uint32_t length, tokens;
  uint32_t first;   // the oldest key that one of the rows sees, in this split
  uint32_t splits;  // that have keys
  bool alike;       // all rows see the same of the unit's keys
  bool plain;       // no soft cap, no slopes
  DecodeWalk walk;
};

struct RowBounds {
  uint32_t begin, end;
};

// Keys of [first, last) that a token's causal bound and window leave.
inline RowBounds row_bounds(const abi::AttentionParams& p, const DecodeUnit& u, uint32_t token,
                            uint32_t first, uint32_t last) {
  const int32_t position = static_cast<int32_t>(u.length + token) - static_cast<int32_t>(u.tokens);
  int32_t begin = 0, end = static_cast<int32_t>(u.length);
  const auto window = static_cast<int32_t>(abi::kv_least(p.window, 0x7FFFFFFF - kDecodeMostRows));
  if (window != 0) begin = position + 1 - window;
  if (p.causal != 0) end = position + 1;
  const auto clamp = [&](int32_t x) {
    const auto low = static_cast<int32_t>(first), high = static_cast<int32_t>(last);
    return static_cast<uint32_t>(x < low ? low : (x > high ? high : x));
  };
  return {clamp(begin), clamp(end)};
}

// Rows come first: their queries are asked for before the keys are found.
inline DecodeUnit unit_rows(const abi::AttentionParams& p, uint32_t most_rows) {
  const auto small = [](uint64_t x) { return static_cast<uint32_t>(x); };
  DecodeUnit u = {};
  u.kv_head = blockIdx.z;
  u.tokens = small(p.tokens);
  u.group = p.group;
  u.first_row = blockIdx.y * most_rows;
  const uint32_t left = u.tokens * u.group - u.first_row;
  u.rows = left < most_rows ? left : most_rows;
  return u;
}

inline void find_keys(const abi::AttentionParams& p, const Args& args, uint32_t chunk_keys,
                      DecodeUnit& u) {
  const uint64_t state = args.at[arg_state];
  const auto small = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const uint32_t split = blockIdx.x, splits = gridDim.x;
  u.plain = p.soft_cap == 0 && args.at[arg_slopes] == 0;
  uint32_t first_key = small(p.first_key), end_key = small(p.end_key);
  uint32_t split_keys = small(p.split_keys);
  u.length = small(p.length);
  if (state != 0) {
    await_turn();
    const abi::KvState now = *pointer<const abi::KvState>(state);
    const abi::KvKeys seen = abi::attention_keys(now, p);
    u.length = small(now.length), first_key = small(seen.begin), end_key = small(seen.end);
    // As attention_split_keys, in 32 bits: a division of 64 takes ten times as long.
    const uint32_t keys = end_key - first_key, each = (keys + splits - 1) / splits;
    const uint32_t unit = small(abi::kSplitUnit), whole = (each + unit - 1) / unit * unit;
    split_keys = whole > p.fewest_split_keys ? whole : p.fewest_split_keys;
    u.splits = keys == 0 ? 1 : (keys + split_keys - 1) / split_keys;
  } else {
    u.splits = p.used_splits;
  }
  const uint64_t begin = first_key + uint64_t{split} * split_keys;
  const uint32_t first = begin < end_key ? small(begin) : end_key;
  uint32_t last = end_key;
  if (splits > 1 && end_key - first > split_keys) last = first + split_keys;
  // Bounds grow with the token: the first row's beginning and the last one's end hold all.
  const RowBounds oldest = row_bounds(p, u, 0, first, last);
  const RowBounds newest = row_bounds(p, u, u.tokens - 1, first, last);
  u.alike = oldest.begin == newest.begin && oldest.end == newest.end;
  u.first = oldest.begin;
  const uint32_t count = newest.end > oldest.begin ? newest.end - oldest.begin : 0;
  const auto capacity = small(p.capacity);
  uint32_t slot = small(p.ring_start) + u.first;
  if (slot >= capacity) slot %= capacity;
  u.walk = decode_walk(capacity, slot, count, chunk_keys);
}

// Rows are (token, query head) pairs, the head running fastest.
struct RowPlace {
  uint32_t token, head;
};
inline RowPlace row_place(const DecodeUnit& u, uint32_t r) {
  const uint32_t row = u.first_row + r, token = u.tokens == 1 ? 0 : row / u.group;
  return {token, u.kv_head * u.group + (row - token * u.group)};
}

// Of a row, for masks.
struct MaskRow {
  float slope, offset;  // offset: first key less the query's position
  uint32_t begin, end;  // keys it sees, counted from the unit's first
};

inline MaskRow mask_row(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t slopes,
                        uint32_t r) {
  const RowPlace at = row_place(u, r);
  const RowBounds b = row_bounds(p, u, at.token, u.first, u.length);
  const int32_t position =
      static_cast<int32_t>(u.length + at.token) - static_cast<int32_t>(u.tokens);
  return {slopes == 0 ? 0.0f : pointer<const float>(slopes)[at.head],
          static_cast<float>(static_cast<int32_t>(u.first) - position), b.begin - u.first,
          b.end - u.first};
}

// Of a row, what a warp has: its largest logit, the sum of its probabilities, relative to 2^from,
// and of how many to a unit its values are sums.
struct WarpRow {
  float max, sum, from, per;
};

// Where a row goes, as addresses, found early: parameters come late at the end.
struct RowEnd {
  uint64_t values, states, counter;  // of a merged call: see row_end
  uint64_t out, lse, sink;           // 0: not wanted, or there is none
  uint32_t out_dtype;
};

// In shared memory.
struct DecodeStates {
  WarpRow of_warp[kDecodeMostWarps][kDecodeMostRows];
  MaskRow mask[kDecodeMostRows];
  RowFactors factor;
  SharedTable of_k, of_v;
  PushBarrier pushes;
  RowEnd ends[kDecodeMostRows];
  float2 of_row[kDecodeMostRows];  // {max, sum} of long rows, which several warps join
  bool last[kDecodeMostRows];      // whether this block joins them
};
static_assert(sizeof(DecodeStates) <= kDecodeStateBytes);

// Stages 32, 64, ... in a lane's registers, 1 to 16 between lanes; lane i has coordinates i + 32 c.
template <uint32_t kN>
inline void hadamard_lanes(uint32_t lane, float (&x)[kN / kWarp]) {
#pragma unroll
  for (uint32_t h = 1; h < kN / kWarp; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b, x[i + h] = a - b;
    }
  }
#pragma unroll
  for (uint32_t h = 1; h < kWarp; h *= 2) {
    const float sign = (lane & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i)
      x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAll, x[i], static_cast<int>(h)));
  }
}

// Signs of coordinates first to first + 31, a bit each.
constexpr uint32_t sign_bits(uint32_t first) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < kWarp; ++i) bits |= (abi::kv_sign_bit(first + i) != 0 ? 1u : 0u) << i;
  return bits;
}

// Those of coordinates from kFirst on, times a factor.
template <uint32_t kFirst, uint32_t kAt = 0, uint32_t kEach>
inline void flip_lanes(uint32_t lane, float factor, float (&x)[kEach]) {
  constexpr uint32_t kSigns = sign_bits(kFirst + kAt * kWarp);
  x[kAt] *= (kSigns >> lane & 1u) != 0 ? -factor : factor;
  if constexpr (kAt + 1 < kEach) flip_lanes<kFirst, kAt + 1>(lane, factor, x);
}

// Rows are turned by a warp for each 256 coordinates, of kBlocks: all of the row go in, one block
// comes out.
template <uint32_t kBlocks, uint32_t kEach>
inline void hadamard_block(const float (&x)[kEach], uint32_t block, uint32_t lane,
                           float (&y)[kEach / kBlocks]) {
  static_assert(kBlocks <= 2);
  constexpr uint32_t kHalf = kEach / kBlocks;
#pragma unroll
  for (uint32_t i = 0; i < kHalf; ++i) {
    y[i] = x[i];
    if constexpr (kBlocks == 2) y[i] = block == 0 ? x[i] + x[i + kHalf] : x[i] - x[i + kHalf];
  }
  hadamard_lanes<kHalf * kWarp>(lane, y);
}

constexpr float inverse_root(uint32_t n) {
  return n == 64 ? 0.125f : (n == 128 ? 0.0883883476f : (n == 256 ? 0.0625f : 0.0441941738f));
}

// Of a row, by a warp: lane i has coordinates i + 32 c, from here on.
inline const uint8_t* query_place(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t q,
                                  uint32_t r) {
  const RowPlace at = row_place(u, r);
  const uint32_t each = p.q_dtype == 0 ? 4 : 2;
  return pointer<const uint8_t>(q + at.token * p.q_token_stride + at.head * p.q_head_stride +
                                threadIdx.x % kWarp * each);
}
template <class Shape>
inline void load_query(const uint8_t* from, bool wide, uint32_t (&bits)[Shape::kN / kWarp]) {
#pragma unroll
  for (uint32_t i = 0; i < Shape::kN / kWarp; ++i)
    bits[i] = load_bits(reinterpret_cast<uint64_t>(from), i * kWarp, wide);
}

// A block of a query becomes integers below 2^14, or floats below 2^15.
template <class Shape>
inline void put_query(const abi::AttentionParams& p, const DecodeUnit& u,
                      const uint32_t (&bits)[Shape::kN / kWarp], uint32_t block, float* row,
                      ScoreFactors& factors) {
  constexpr uint32_t kWhole = Shape::kN / kWarp, kEach = kWhole / Shape::kQueryBlocks;
  float whole[kWhole], x[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kWhole; ++i) whole[i] = as_float(bits[i], p.q_dtype);
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t most = 0;  // of magnitudes, as bits; numbers that are not finite have the largest
  if constexpr (Shape::kLevelsK) {
    flip_lanes<0>(lane, 1.0f, whole);
    hadamard_block<Shape::kQueryBlocks>(whole, block, lane, x);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) x[i] = whole[i];
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    if constexpr (Shape::kLevelsK) x[i] *= inverse_root(Shape::kN);
    const uint32_t magnitude = __float_as_uint(x[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  const float largest = __uint_as_float(__reduce_max_sync(kAll, most));
  const bool finite = is_finite(largest);
  // 2^14 for f16's range; bf16 has f32's, and products with large keys must not leave it.
  const int32_t top = Shape::kLevelsK ? 13 : (Shape::kK == kPlanBf16 ? 0 : 14);
  const int32_t up = largest == 0 || !finite ? 0 : top - exponent_of(largest);
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
    row[lane + i * kWarp] = finite ? times_power(x[i], up) : 0.0f;
  if (lane == 0) {
    const float scale = p.scale * (u.plain ? kLog2E : 1.0f) * (Shape::kLevelsK ? 0x1p-31f : 1.0f);
    factors = {finite ? power_of_two(-up >> 1) : __uint_as_float(0x7FC00000u),
               power_of_two(-up - (-up >> 1)) * scale, 0};
  }
}

}  // namespace gyre::cuda
