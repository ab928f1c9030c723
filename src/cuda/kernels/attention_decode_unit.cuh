#pragma once
// Decode attention: what a block is to do, and its queries.
#include "attention_decode_copy.cuh"
#include "attention_decode_values.cuh"

namespace gyre::cuda {

using enum abi::AttentionArg;

template <uint32_t kKeys, uint32_t kValues, uint32_t kDim>
struct Decode {
  static constexpr uint32_t kK = kKeys, kV = kValues, kN = kDim;
  static constexpr DecodeShape kShape = decode_shape(kK, kV, kN);
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  static constexpr uint32_t kTiles = kShape.tiles, kBlocks = kShape.blocks;
  static_assert(kShape.fits);

  // Where the key in column c of product t lies, and which it is: two neighbours of a tile go to
  // two columns.
  static constexpr bool kTurned = kLevelsV && value_item<kV>(1) != 1;
  static constexpr uint32_t place(uint32_t t, uint32_t c) {
    return kLevelsV ? c / 2 * 8 + 2 * t + c % 2 : 8 * t + c;
  }
  static constexpr uint32_t key(uint32_t t, uint32_t c) {
    if constexpr (kLevelsV) return c / 2 * 8 + value_item<kV>(2 * t + c % 2);
    return 8 * t + c;
  }
};

// What a block is to do; the same in every thread.
struct DecodeUnit {
  uint32_t kv_head, rows, group;
  uint32_t length, tokens;
  uint32_t first;   // the oldest key that one of the rows sees, in this split
  uint32_t splits;  // that have keys
  bool paired, alike;
  bool plain;  // no soft cap, no slopes
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

inline DecodeUnit make_unit(const abi::AttentionParams& p, const Args& args) {
  const uint64_t state = args.at[arg_state];
  DecodeUnit u = {};
  const auto small = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const uint32_t split = blockIdx.x, splits = gridDim.x;
  u.kv_head = blockIdx.z;
  u.tokens = small(p.tokens);
  u.group = small(p.heads) / gridDim.z;
  u.rows = u.tokens * u.group;
  u.paired = u.rows <= 4;
  u.plain = p.soft_cap == 0 && args.at[arg_slopes] == 0;
  uint32_t first_key = small(p.first_key), end_key = small(p.end_key);
  uint32_t split_keys = small(p.split_keys);
  u.length = small(p.length);
  if (state != 0) {
    const abi::KvState now = *pointer<const abi::KvState>(state);
    const abi::KvKeys keys = abi::attention_keys(now, p);
    u.length = small(now.length), first_key = small(keys.begin), end_key = small(keys.end);
    // As attention_split_keys, in 32 bits: a division of 64 takes ten times as long.
    const uint32_t each = (end_key - first_key + splits - 1) / splits;
    const uint32_t unit = small(abi::kSplitUnit), whole = (each + unit - 1) / unit * unit;
    split_keys = whole > p.fewest_split_keys ? whole : p.fewest_split_keys;
  }
  const uint32_t keys = end_key - first_key;
  u.splits = split_keys == 0 ? 1 : (keys + split_keys - 1) / split_keys;
  if (u.splits == 0) u.splits = 1;
  uint32_t first = first_key + split * split_keys, last = end_key;
  if (first > end_key) first = end_key;
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
  u.walk = decode_walk(capacity, slot, count);
  return u;
}

// Rows are (token, query head) pairs, the head running fastest.
struct RowPlace {
  uint32_t token, head;
};
inline RowPlace row_place(const DecodeUnit& u, uint32_t r) {
  const uint32_t token = r / u.group;
  return {token, u.kv_head * u.group + (r - token * u.group)};
}

// In shared memory.
struct DecodeStates {
  float2 of_warp[kDecodeMostWarps][kDecodeMostRows];  // max, sum
  float factor[kDecodeMostRows][2];  // what scores are multiplied with, in two steps
  float2 of_row[kDecodeMostRows];
  uint32_t last;
};
static_assert(sizeof(DecodeStates) <= kDecodeStateBytes);

// Stages 32, 64, ... in a lane's registers, 1 to 16 between lanes; lane i has coordinates i + 32 c.
template <uint32_t kN>
inline void hadamard_lanes(float (&x)[kN / kWarp]) {
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
#pragma unroll
    for (uint32_t i = 0; i < kN / kWarp; ++i) {
      const float other = __shfl_xor_sync(kAll, x[i], static_cast<int>(h));
      x[i] = (threadIdx.x & h) != 0 ? other - x[i] : x[i] + other;
    }
  }
}

template <uint32_t kN>
inline void flip_lanes(float (&x)[kN / kWarp], float factor) {
#pragma unroll
  for (uint32_t i = 0; i < kN / kWarp; ++i)
    x[i] *= abi::kv_sign_bit(threadIdx.x % kWarp + i * kWarp) != 0 ? -factor : factor;
}

constexpr float inverse_root(uint32_t n) {
  return n == 64 ? 0.125f : (n == 128 ? 0.0883883476f : (n == 256 ? 0.0625f : 0.0441941738f));
}

// Of a row, by a warp: lane i has coordinates i + 32 c.
template <class Shape>
inline void load_query(const abi::AttentionParams& p, const DecodeUnit& u, uint64_t q, uint32_t r,
                       float (&x)[Shape::kN / kWarp]) {
  const RowPlace at = row_place(u, r);
  const uint64_t from = q + at.token * p.q_token_stride + at.head * p.q_head_stride;
#pragma unroll
  for (uint32_t i = 0; i < Shape::kN / kWarp; ++i)
    x[i] = load_as_float(from, p.q_dtype, threadIdx.x % kWarp + i * kWarp);
}

// A query becomes integers below 2^14, or floats below 2^15.
template <class Shape>
inline void put_query(float (&x)[Shape::kN / kWarp], float* row, float (&factor)[2]) {
  constexpr uint32_t kEach = Shape::kN / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  float largest = 0;
  bool finite = true;
  if constexpr (Shape::kLevelsK) {
    flip_lanes<Shape::kN>(x, 1.0f);
    hadamard_lanes<Shape::kN>(x);
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    if constexpr (Shape::kLevelsK) x[i] *= inverse_root(Shape::kN);
    largest = fmaxf(largest, fabsf(x[i]));
    finite = finite && is_finite(x[i]);
  }
  largest = warp_max(largest);
  finite = __all_sync(kAll, finite) != 0;
  // 2^14 for f16's range; bf16 has f32's, and products with large keys must not leave it.
  const int32_t top = Shape::kLevelsK ? 13 : (Shape::kK == kPlanBf16 ? 0 : 14);
  const int32_t up = largest == 0 || !finite ? 0 : top - exponent_of(largest);
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
    row[lane + i * kWarp] = finite ? times_power(x[i], up) : 0.0f;
  if (lane == 0) {
    factor[0] = finite ? power_of_two(-up >> 1) : __uint_as_float(0x7FC00000u);
    factor[1] = power_of_two(-up - (-up >> 1));
  }
}

}  // namespace gyre::cuda
