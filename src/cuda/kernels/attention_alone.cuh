#pragma once
// Attention for up to 8 rows that all see the same keys, as in decoding: every warp works alone on
// 16 or 32 keys at a time, from their copy into shared memory to its own sums; the warps meet once,
// at the end. Scores are products with queries as rows, their first part 0 to 7, what that leaves
// 8 to 15, and keys as columns: a lane ends up with the weights of just those keys whose values it
// has to name as columns of the second product, so that nothing moves between lanes.
#include "attention_keys.cuh"
#include "attention_values.cuh"

namespace gyre::cuda {

// How a warp's keys lie in shared memory. Values of 16 bits: key 8 t + g is column g of product t.
// Levels: a lane j has tile j, and column g of product t is of tile g / 2.
template <uint32_t kK, uint32_t kV, uint32_t kN>
struct Alone {
  static constexpr bool kLevelsK = abi::kv_is_native(kK), kLevelsV = abi::kv_is_native(kV);
  static constexpr AloneShape kShape = alone_shape(kK, kV, kN);
  static constexpr uint32_t kOf = kShape.keys, kTiles = kShape.tiles, kBytes = kShape.bytes;
  static constexpr uint32_t kKeyBytes = kShape.key_bytes, kKeyScales = kShape.key_scales;
  static constexpr uint32_t kValueBytes = kShape.value_bytes, kValueScales = kShape.value_scales;
  static constexpr uint32_t kValues = kShape.values, kValuePitch = kShape.value_pitch;
  static constexpr bool kFits =
      kKeyBytes % 16 == 0 && kValueBytes % 16 == 0 && (!kLevelsK || whole_groups<kK>(kN) == kN);
  static constexpr uint32_t kSumsPitch = kN + 4;  // rows of a lane's neighbours: 8 banks apart
  static_assert(2 * kBytes >= 8 * (8 + kSumsPitch * 4), "a warp's sums lie where its keys were");
  static constexpr uint32_t kApart = kV == abi::kTq4 ? 4 : 1;  // keys that a lane pair reads

  // Column c of product t.
  static constexpr uint32_t key(uint32_t t, uint32_t c) {
    if constexpr (!kLevelsV) return 8 * t + c;
    return c / 2 * 8 + item_in_eight<kV>(2 * t + c % 2);
  }
  static constexpr uint32_t key_place(uint32_t key) {
    return key / 8 * kShape.key_tile + key % 8 * kShape.key_pitch;
  }
  // 16-bit keys: the halves of 128 bytes.
  static constexpr uint32_t key_swap(uint32_t key) { return kLevelsK ? 0 : key / kApart % 2 * 64; }
};

// The walk in 32 bits, for one warp.
struct AloneWalk {
  uint32_t skip, end_a, begin_b, end_b;  // slots with keys are [skip, end_a) and [begin_b, end_b)
  uint32_t tiles;

  bool valid(uint32_t at) const { return at < begin_b ? at >= skip && at < end_a : at < end_b; }
  bool whole(uint32_t begin, uint32_t end) const {
    return (begin >= skip && end <= end_a) || (begin >= begin_b && end <= end_b);
  }
};

inline AloneWalk alone_walk(const Walk& w) {
  const auto small = [](uint64_t x) { return static_cast<uint32_t>(x); };
  return {small(w.skip), small(w.skip + w.count_a), small(w.tiles_a * abi::kKvTile),
          small(w.tiles_a * abi::kKvTile + w.count - w.count_a), small(w.tiles)};
}

struct AloneSource {
  const uint8_t* from;
  uint64_t tile_stride;
  uint32_t stride;  // of rows
};

// kRows rows of kBytes each to where `place` says. kSlots: rows in a tile, 8, or 1 for whole tiles.
template <uint32_t kRows, uint32_t kBytes, uint32_t kSlots, class Place>
inline void copy_alone(const AloneSource& s, const Unit& u, const AloneWalk& walk, uint32_t tile,
                       bool whole, const Place& place) {
  constexpr uint32_t kPieces = kBytes / 16, kAllPieces = kRows * kPieces;
  const uint32_t lane = threadIdx.x % kWarp;
  if (whole) {
    const uint8_t* const from = s.from + u.walk.tile(tile) * s.tile_stride;
#pragma unroll
    for (uint32_t i = 0; i < (kAllPieces + kWarp - 1) / kWarp; ++i) {
      const uint32_t at = lane + i * kWarp, row = at / kPieces, piece = at % kPieces;
      if (kAllPieces % kWarp != 0 && at >= kAllPieces) break;
      copy_async<16>(place(row, piece), from + row * s.stride + piece * 16, true);
    }
    return;
  }
#pragma unroll 1
  for (uint32_t at = lane; at < kAllPieces; at += kWarp) {
    const uint32_t row = at / kPieces, piece = at % kPieces, index = tile + row / kSlots;
    const bool present =
        index < walk.tiles && (kSlots == 1 || walk.valid(index * abi::kKvTile + row % kSlots));
    const uint8_t* const from = s.from + u.walk.tile(present ? index : 0) * s.tile_stride +
                                row % kSlots * s.stride + piece * 16;
    copy_async<16>(place(row, piece), present ? from : s.from, present);
  }
}

// Asks for keys and values [kOf chunk, kOf chunk + kOf).
template <class Shape, uint32_t kK, uint32_t kV>
inline void load_alone(const Unit& u, const AloneWalk& walk, uint32_t chunk, unsigned char* to) {
  const uint32_t tile = chunk * Shape::kTiles;
  if (tile < walk.tiles) {
    const abi::AttentionParams& p = u.params;
    const bool whole = walk.whole(chunk * Shape::kOf, chunk * Shape::kOf + Shape::kOf);
    const uint64_t k_stride = p.k.codes_tile_stride, v_stride = p.v.codes_tile_stride;
    copy_alone<Shape::kOf, Shape::kKeyBytes, 8>(
        {u.k_codes, k_stride, static_cast<uint32_t>(k_stride / abi::kKvTile)}, u, walk, tile, whole,
        [to](uint32_t row, uint32_t piece) {
          return to + Shape::key_place(row) + (piece * 16 ^ Shape::key_swap(row));
        });
    if constexpr (Shape::kLevelsK) {
      const auto stride = static_cast<uint32_t>(p.k.scales_tile_stride);
      copy_alone<Shape::kTiles, 16, 1>(
          {u.k_scales, stride, stride}, u, walk, tile, whole,
          [to](uint32_t row, uint32_t) { return to + Shape::kKeyScales + row * 16; });
    }
    if constexpr (Shape::kLevelsV) {
      copy_alone<Shape::kTiles, Shape::kValueBytes, 1>(
          {u.v_codes, v_stride, static_cast<uint32_t>(v_stride)}, u, walk, tile, whole,
          [to](uint32_t row, uint32_t piece) {
            return to + Shape::kValues + row * Shape::kValuePitch + piece * 16;
          });
      const auto stride = static_cast<uint32_t>(p.v.scales_tile_stride);
      copy_alone<Shape::kTiles, 16, 1>(
          {u.v_scales, stride, stride}, u, walk, tile, whole,
          [to](uint32_t row, uint32_t) { return to + Shape::kValueScales + row * 16; });
    } else {
      copy_alone<Shape::kOf, Shape::kValueBytes, 8>(
          {u.v_codes, v_stride, static_cast<uint32_t>(v_stride / abi::kKvTile)}, u, walk, tile,
          whole, [to](uint32_t row, uint32_t piece) {
            return to + Shape::kValues + row * Shape::kValuePitch + (piece ^ row % 8) * 16;
          });
    }
  }
  copy_commit();
}

// Scale of slot i of the tile whose eight scales these are.
inline float scale_in(const uint4& scales, uint32_t i) {
  const uint32_t words[4] = {scales.x, scales.y, scales.z, scales.w};
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 15 & 0x7FFF8000u
                                    : words[i / 2] >> 1 & 0x7FFF8000u);
}

// s[t][i]: row g's score for the key in column 2 j + i of product t.
template <class Shape, uint32_t kK, uint32_t kV, uint32_t kN>
inline void score_alone(const uint4* q, const unsigned char* stage, float (&s)[Shape::kTiles][2]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  if constexpr (Shape::kLevelsK) {
    int32_t c[Shape::kTiles][4] = {};
#pragma unroll
    for (uint32_t step = 0; step < kN / 32; ++step) {
      const uint4 w = q[step * kWarp];
      const uint32_t a[4] = {w.x, w.z, w.y, w.w};
#pragma unroll
      for (uint32_t t = 0; t < Shape::kTiles; ++t) {
        const Levels8 x = key_levels<kK>(stage + Shape::key_place(Shape::key(t, g)), kN, step, j);
        mma_s8(c[t], a, x.first, x.second);
      }
    }
    const auto* const scales = reinterpret_cast<const uint4*>(stage + Shape::kKeyScales);
    uint4 of_tile = scales[Shape::kLevelsV ? j : 0];
#pragma unroll
    for (uint32_t t = 0; t < Shape::kTiles; ++t) {
      if (!Shape::kLevelsV && t != 0) of_tile = scales[t];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        float scale;
        if constexpr (Shape::kLevelsV) {
          scale = scale_in(of_tile, item_in_eight<kV>(2 * t + i));
        } else {
          const uint32_t word =
              j == 0 ? of_tile.x : (j == 1 ? of_tile.y : (j == 2 ? of_tile.z : of_tile.w));
          scale = scale_in(make_uint4(word, 0, 0, 0), i);
        }
        s[t][i] = static_cast<float>(c[t][i] * 256 + c[t][i + 2]) * (scale * 0x1p-31f);
      }
    }
  } else {
    float c[Shape::kTiles][4] = {}, d[Shape::kTiles][4] = {};  // shorter chains
    const uint32_t swap = Shape::key_swap(Shape::key(0, g));
    const unsigned char* const even = stage + j * 16 + swap;
    const unsigned char* const odd = stage + j * 16 + (64 - swap);
#pragma unroll
    for (uint32_t span = 0; span < kN / 32; ++span) {
      const uint4 w = q[span * 2 * kWarp], w2 = q[(span * 2 + 1) * kWarp];
      const uint32_t a[4] = {w.x, w.z, w.y, w.w}, b[4] = {w2.x, w2.z, w2.y, w2.w};
#pragma unroll
      for (uint32_t t = 0; t < Shape::kTiles; ++t) {
        const uint4 x = *reinterpret_cast<const uint4*>(
            (span % 2 == 0 ? even : odd) + span / 2 * 128 + Shape::key_place(Shape::key(t, g)));
        HalfType<kK>::mma(c[t], a, x.x, x.y);
        HalfType<kK>::mma(d[t], b, x.z, x.w);
      }
    }
#pragma unroll
    for (uint32_t t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) s[t][i] = (c[t][i] + d[t][i]) + (c[t][i + 2] + d[t][i + 2]);
    }
  }
}

// Of row g, alike in its four lanes but for the sum.
struct AloneRow {
  float max, sum;
  float weight;  // largest so far, for levels of V
  int32_t up;    // weights are scaled by 2^up
};

// Largest of a row's four lanes.
inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}

// Sums are of rows 2 j and 2 j + 1, factors of row g.
template <uint32_t kColumns>
inline void rescale_alone(float factor, float (&acc)[kColumns][4]) {
  const uint32_t j = threadIdx.x % 4;
  const float first = __shfl_sync(kAll, factor, static_cast<int>(8 * j));
  const float second = __shfl_sync(kAll, factor, static_cast<int>(8 * j + 4));
#pragma unroll
  for (uint32_t i = 0; i < kColumns * 4; ++i) acc[i / 4][i % 4] *= i % 2 == 0 ? first : second;
}

inline float finite_or_zero(float x) { return is_finite(x) ? x : 0.0f; }

template <class T>
inline uint32_t pack_two(float a, float b) {
  return from_float<T>(a).bits | static_cast<uint32_t>(from_float<T>(b).bits) << 16;
}

// Scores in base 2 become weights, as 16-bit pairs for the second product: rest is what a first
// part leaves (bf16).
template <class Shape, uint32_t kV, uint32_t kColumns>
inline void weigh_alone(const unsigned char* stage, float (&x)[Shape::kTiles][2], AloneRow& row,
                        float (&acc)[kColumns][4], uint32_t (&w)[Shape::kTiles],
                        uint32_t (&rest)[Shape::kTiles]) {
  constexpr uint32_t kT = Shape::kTiles;
  float max = fmaxf(x[0][0], x[0][1]);
#pragma unroll
  for (uint32_t t = 1; t < kT; ++t) max = fmaxf(max, fmaxf(x[t][0], x[t][1]));
  max = fmaxf(row.max, row_max(max));
  // A row that has seen nothing is measured from 0, so that -inf less -inf does not appear.
  const float from = max == minus_infinity() ? 0.0f : max;
  bool changed = max != row.max;
#pragma unroll
  for (uint32_t i = 0; i < kT * 2; ++i) x[i / 2][i % 2] = exp2_fast(x[i / 2][i % 2] - from);
  float added = 0;
#pragma unroll
  for (uint32_t t = 0; t < kT; ++t) added += x[t][0] + x[t][1];
  float largest = 0;
  if constexpr (Shape::kLevelsV) {
    const uint4 scales =
        reinterpret_cast<const uint4*>(stage + Shape::kValueScales)[threadIdx.x % 4];
#pragma unroll
    for (uint32_t i = 0; i < kT * 2; ++i) {
      float& p = x[i / 2][i % 2];
      // The scale of a slot without a key may be NaN, or never written.
      p = p == 0 ? 0.0f : p * scale_in(scales, item_in_eight<kV>(i));
      largest = fmaxf(largest, finite_or_zero(p));
    }
    largest = row_max(largest);
    changed = changed || largest > row.weight;
  }
  if (__any_sync(kAll, changed) != 0) {
    const float keep = exp2_fast(row.max - from);
    float factor = keep;
    row.max = max;
    row.sum *= keep;
    if constexpr (Shape::kLevelsV) {
      row.weight = fmaxf(finite_or_zero(row.weight * keep), largest);
      const int32_t up = kWeightTop - (row.weight == 0 ? 0 : exponent_of(row.weight));
      factor = times_power(keep, up - row.up);
      row.up = up;
    }
    rescale_alone(factor, acc);
  }
  row.sum += added;
  if constexpr (kV == kPlanBf16) {
#pragma unroll
    for (uint32_t t = 0; t < kT; ++t) {
      w[t] = pack_two<BFloat16>(x[t][0], x[t][1]);
      rest[t] = pack_two<BFloat16>(x[t][0] - __uint_as_float(w[t] << 16),
                                   x[t][1] - __uint_as_float(w[t] & 0xFFFF0000u));
    }
  } else {
    const float a = Shape::kLevelsV ? power_of_two(row.up >> 1) : power_of_two(kWeightTop);
    const float b = Shape::kLevelsV ? power_of_two(row.up - (row.up >> 1)) : 1.0f;
#pragma unroll
    for (uint32_t t = 0; t < kT; ++t) w[t] = pack_two<Half>(x[t][0] * a * b, x[t][1] * a * b);
  }
}

template <class Shape, uint32_t kV, uint32_t kN>
inline void add_alone(const unsigned char* stage, const uint32_t (&w)[Shape::kTiles],
                      const uint32_t (&rest)[Shape::kTiles], float (&acc)[kN / 16][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  if constexpr (Shape::kLevelsV) {
    const uint8_t* const tile = stage + Shape::kValues + j * Shape::kValuePitch;
#pragma unroll
    for (uint32_t i = 0; i < kN / 16; ++i) {
      const Levels8 x = value_levels<kV>(tile, kN, i * 16 + g);
      const Levels8 y = value_levels<kV>(tile, kN, i * 16 + g + 8);
      uint32_t a[4], b[4];
      to_halves(x.first, a[0], a[2]), to_halves(y.first, a[1], a[3]);
      to_halves(x.second, b[0], b[2]), to_halves(y.second, b[1], b[3]);
      mma_f16(acc[i], a, w[0], w[1]);
      mma_f16(acc[i], b, w[2], w[3]);
    }
  } else {
    const uint32_t row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    const unsigned char* const values = stage + Shape::kValues + row * Shape::kValuePitch;
#pragma unroll
    for (uint32_t i = 0; i < kN / 16; ++i) {
      uint32_t a[4];
      load_transposed(a, values + ((2 * i + half) ^ row % 8) * 16);
      if constexpr (kV == kPlanBf16) HalfType<kV>::mma(acc[i], a, rest[0], rest[1]);
      HalfType<kV>::mma(acc[i], a, w[0], w[1]);
    }
  }
}

}  // namespace gyre::cuda
