#pragma once
// From scores to weights, and the weighted sum of a chunk's values. Values are the rows of a
// product, 16 coordinates to a tile, queries its columns: a warp owns every warps-th tile of
// coordinates for all keys, so that nothing is added up between warps.
#include "attention_unit.cuh"

namespace gyre::cuda {

constexpr uint32_t kMostTiles = 4;              // of coordinates, for a warp: 256 / 16 / 4 warps
constexpr uint32_t kKeys = kMostChunk / kWarp;  // of a row, for a lane: every 32nd
constexpr int32_t kWeightTop = 14;  // weights are scaled to end below 2^15, for f16's range

template <uint32_t kV>
inline uint32_t weight_place(uint32_t key) {
  if constexpr (!abi::kv_is_native(kV)) return key;
  return key / 8 * 8 + place_in_eight<kV>(key % 8);
}

// A row's logit in base 2.
inline float logit_of(const Unit& u, const abi::AttentionParams& p, uint32_t row, float score,
                      uint64_t at) {
  const Rows& rows = u.state();
  float x = score * rows.factor[row][0] * rows.factor[row][1] * p.scale;
  if (p.soft_cap > 0) x = soft_cap(x, p.soft_cap);
  if (rows.slope[row] != 0)
    x += rows.slope[row] * static_cast<float>(u.walk.key_of(at) - rows.position[row]);
  return x * kLog2E;
}

inline bool sees(const Unit& u, const abi::AttentionParams& p, uint32_t row, int64_t key,
                 const uint8_t* tree) {
  if (key < u.state().begin[row] || key >= u.state().end[row]) return false;
  const int64_t fresh = key - (static_cast<int64_t>(p.length) - static_cast<int64_t>(p.tokens));
  return tree == nullptr || fresh < 0 ||
         tree[u.token(row) * p.tree_stride + static_cast<uint64_t>(fresh)] != 0;
}

// Weights of one row for one scale block (V in levels), or for all coordinates: probability times
// scale, as f16 below 2^15 and a factor.
template <uint32_t kV>
inline void store_weights(const Unit& u, uint32_t row, const float (&w)[kKeys], uint32_t plane,
                          int32_t bias) {
  const uint32_t lane = threadIdx.x % kWarp;
  int32_t up = kWeightTop;
  if constexpr (abi::kv_is_native(kV)) {
    float largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) largest = fmaxf(largest, is_finite(w[i]) ? w[i] : 0.0f);
    largest = warp_max(largest);
    up = kWeightTop - (largest == 0 ? 0 : exponent_of(largest));
  }
  auto* const to = reinterpret_cast<Half*>(
      u.shared() + u.plan.weights + plane * u.plan.weights_plane + row * u.plan.weights_pitch);
#pragma unroll
  for (uint32_t i = 0; i < kKeys; ++i) {
    const uint32_t key = lane + i * kWarp;
    if (key < u.plan.chunk) to[weight_place<kV>(key)] = from_float<Half>(times_power(w[i], up));
  }
  const int32_t down = bias - up;
  if (lane == 0)
    u.factors()[plane * u.plan.rows + row] =
        make_float2(power_of_two(down >> 1), power_of_two(down - (down >> 1)));
}

template <uint32_t kV>
inline void make_weights(const Unit& u, uint32_t row, const float (&prob)[kKeys],
                         const unsigned char* stage) {
  const uint32_t lane = threadIdx.x % kWarp;
  if constexpr (abi::kv_is_native(kV)) {
#pragma unroll 1
    for (uint32_t b = 0; b < u.plan.v_blocks; ++b) {
      float w[kKeys];
#pragma unroll
      for (uint32_t i = 0; i < kKeys; ++i) {
        const uint32_t key = lane + i * kWarp;
        // The scale of a slot that is not seen may be NaN, or never written.
        w[i] = prob[i] == 0 || key >= u.plan.chunk
                   ? 0.0f
                   : prob[i] * raw_scale(stage + u.plan.v_scales + key / 8 * u.plan.v_blocks * 16,
                                         b, key % 8);
      }
      store_weights<kV>(u, row, w, b, kScaleBias);
    }
  } else if constexpr (kV == kPlanF16) {
    store_weights<kV>(u, row, prob, 0, 0);
  } else if constexpr (kV == kPlanBf16) {
    auto* const to =
        reinterpret_cast<BFloat16*>(u.shared() + u.plan.weights + row * u.plan.weights_pitch);
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
      const uint32_t key = lane + i * kWarp;
      if (key >= u.plan.chunk) continue;
      to[key] = from_float<BFloat16>(prob[i]);
      to[u.plan.weights_plane / 2 + key] = from_float<BFloat16>(prob[i] - to_float(to[key]));
    }
    if (lane == 0) u.factors()[row] = make_float2(1.0f, 1.0f);
  } else if (lane == 0) {
    u.factors()[row] = make_float2(1.0f, 1.0f);
  }
}

// Rows that are only there to fill a product keep the weight 0.
inline void clear_weights(const Unit& u) {
  auto* const words = reinterpret_cast<uint32_t*>(u.shared() + u.plan.weights);
  for (uint32_t i = threadIdx.x; i < (u.plan.stage - u.plan.weights) / 4; i += blockDim.x)
    words[i] = 0;
}

// Which of a lane's keys a row sees, a bit each; missing: one is there and not seen.
inline uint32_t seen_keys(const Unit& u, const abi::AttentionParams& p, uint32_t chunk,
                          uint32_t row, const uint8_t* tree, bool& missing) {
  const uint32_t tiles = u.plan.chunk / abi::kKvTile;
  const ChunkView view = view_chunk(u.walk, uint64_t{chunk} * tiles, tiles);
  missing = false;
  if (view.whole && tree == nullptr && view.key >= u.state().begin[row] &&
      view.key + u.plan.chunk <= u.state().end[row])
    return (1u << (u.plan.chunk + kWarp - 1) / kWarp) - 1;
  uint32_t seen = 0;
#pragma unroll 1
  for (uint32_t i = 0; i * kWarp < u.plan.chunk; ++i) {
    const uint32_t index = threadIdx.x % kWarp + i * kWarp;
    const uint64_t at = uint64_t{chunk} * u.plan.chunk + index;
    if (index >= u.plan.chunk || at >= u.walk.tiles * abi::kKvTile || !u.walk.valid(at)) continue;
    if (sees(u, p, row, u.walk.key_of(at), tree)) {
      seen |= 1u << i;
    } else {
      missing = true;
    }
  }
  return seen;
}

// A warp folds the chunk into one row's state; the scores become probabilities.
template <uint32_t kV>
inline void fold_row(const Unit& u, const abi::AttentionParams& p, uint32_t chunk, uint32_t row,
                     const uint8_t* tree) {
  const uint32_t lane = threadIdx.x % kWarp;
  Rows& rows = u.state();
  float* const scores = u.logits() + row * u.plan.logits_pitch;
  bool missing = false;
  const uint32_t seen = seen_keys(u, p, chunk, row, tree, missing);
  float x[kKeys];
#pragma unroll
  for (uint32_t i = 0; i < kKeys; ++i) {
    const uint32_t index = lane + i * kWarp;
    x[i] = minus_infinity();
    if (index >= u.plan.chunk || (seen >> i & 1) == 0) continue;
    float score = scores[index];
    for (uint32_t part = 1; part < u.plan.parts; ++part)
      score += scores[part * u.plan.rows * u.plan.logits_pitch + index];
    x[i] = logit_of(u, p, row, score, uint64_t{chunk} * u.plan.chunk + index);
  }
  const float old = rows.max[row], sum = rows.sum[row];
  float max = fmaxf(x[0], x[1]);
#pragma unroll
  for (uint32_t i = 2; i < kKeys; ++i) max = fmaxf(max, x[i]);
  max = fmaxf(old, warp_max(max));
  // A row that has seen nothing is measured from 0, so that -inf less -inf does not appear.
  const float from = max == minus_infinity() ? 0.0f : max;
  float prob[kKeys], added = 0;
#pragma unroll
  for (uint32_t i = 0; i < kKeys; ++i) {
    prob[i] = exp2_fast(x[i] - from);
    added += prob[i];
  }
  added = warp_sum(added);
  const float keep = exp2_fast(old - from);
  missing = __any_sync(kAll, missing) != 0;
#pragma unroll
  for (uint32_t i = 0; i < kKeys; ++i) {
    if (lane + i * kWarp < u.plan.chunk) scores[lane + i * kWarp] = prob[i];
  }
  make_weights<kV>(u, row, prob, u.stage(chunk));
  __syncwarp();
  if (lane != 0) return;
  rows.max[row] = max;
  rows.sum[row] = sum * keep + added;
  rows.keep[row] = keep;
  if (missing) rows.hidden = 1;
}

template <uint32_t kV>
inline void sum_levels(const Unit& u, uint32_t block, const unsigned char* stage, uint32_t column,
                       float (&c)[2][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const uint32_t n = u.params.v.head_dim;
  const unsigned char* const weights = u.shared() + u.plan.weights + block * u.plan.weights_plane +
                                       g * u.plan.weights_pitch + j * 16;
#pragma unroll 1
  for (uint32_t h = 0; h < u.plan.chunk / 32; ++h) {
    const uint8_t* const tile = stage + u.plan.v_codes + (h * 4 + j) * u.plan.v_pitch;
    const Levels8 x = value_levels<kV>(tile, n, column + g);
    const Levels8 y = value_levels<kV>(tile, n, column + g + 8);
    uint32_t a[4], b[4];
    to_halves(x.first, a[0], a[2]), to_halves(y.first, a[1], a[3]);
    to_halves(x.second, b[0], b[2]), to_halves(y.second, b[1], b[3]);
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= u.plan.rows / 8) break;
      const uint4 w =
          *reinterpret_cast<const uint4*>(weights + 8 * t * u.plan.weights_pitch + h * 64);
      mma_f16(c[t], a, w.x, w.y);
      mma_f16(c[t], b, w.z, w.w);
    }
  }
}

inline bool not_finite(uint32_t halves, uint32_t exponent) {
  return (halves & exponent) == exponent || (halves >> 16 & exponent) == exponent;
}

// Returns whether a value was infinite or NaN, if `look`.
template <uint32_t kV>
inline bool sum_halves(const Unit& u, const unsigned char* stage, uint32_t column, bool look,
                       float (&c)[2][4]) {
  constexpr uint32_t kExponent = kV == kPlanF16 ? 0x7C00u : 0x7F80u;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const unsigned char* const values = stage + u.plan.v_codes + column * 2;
  bool bad = false;
  for (uint32_t s = 0; s < u.plan.chunk / 16; ++s) {
    uint32_t a[4];
    load_transposed(
        a, values + (s * 16 + lane % 8 + lane / 16 * 8) * u.plan.v_pitch + lane / 8 % 2 * 16);
    if (look) {
      bad = bad || not_finite(a[0], kExponent) || not_finite(a[1], kExponent) ||
            not_finite(a[2], kExponent) || not_finite(a[3], kExponent);
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= u.plan.rows / 8) break;
      const unsigned char* const w =
          u.shared() + u.plan.weights + (8 * t + g) * u.plan.weights_pitch + s * 32 + j * 4;
      if constexpr (kV == kPlanBf16) {
        const unsigned char* const rest = w + u.plan.weights_plane;
        HalfType<kV>::mma(c[t], a, *reinterpret_cast<const uint32_t*>(rest),
                          *reinterpret_cast<const uint32_t*>(rest + 16));
      }
      HalfType<kV>::mma(c[t], a, *reinterpret_cast<const uint32_t*>(w),
                        *reinterpret_cast<const uint32_t*>(w + 16));
    }
  }
  return bad;
}

// Key by key, without the keys of weight 0: the slots of others are not read, or must not matter.
template <uint32_t kV>
inline void sum_one_by_one(const Unit& u, const abi::AttentionParams& p, uint32_t chunk,
                           uint32_t column, float (&c)[2][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4, n = p.v.head_dim;
  for (uint32_t key = 0; key < u.plan.chunk; ++key) {
    const uint64_t at = uint64_t{chunk} * u.plan.chunk + key;
    if (at >= u.walk.tiles * abi::kKvTile || !u.walk.valid(at)) continue;
    const uint64_t slot = u.walk.tile(at / abi::kKvTile) * abi::kKvTile + at % abi::kKvTile;
    const uint8_t* const row = u.v_codes + slot * (p.v.codes_tile_stride / abi::kKvTile);
    const auto* const norms =
        reinterpret_cast<const float*>(u.v_scales + slot * (p.v.scales_tile_stride / abi::kKvTile));
    float x[2] = {0.0f, 0.0f};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t at_column = column + g + 8 * i;
      if (at_column >= n) continue;
      if constexpr (kV <= kPlanBf16) {
        x[i] = load_as_float(reinterpret_cast<uint64_t>(row), kV, at_column);
      } else {
        const uint32_t code =
            kV == abi::kCompat4 ? row[at_column / 2] >> (at_column % 2 * 4) : row[at_column];
        x[i] = compat_centroid<kV>(code) * (norms[n == 512 ? at_column / 256 : 0] / compat_unit(n));
      }
    }
    const float up = kV == kPlanF16 ? power_of_two(kWeightTop) : 1.0f;
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= u.plan.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float w = u.logits()[(8 * t + 2 * j + i % 2) * u.plan.logits_pitch + key] * up;
        if (w != 0) c[t][i] += w * x[i / 2];
      }
    }
  }
}

// acc[tile][8 rows][C fragment]: the chunk's sum joins the rest as a whole.
template <uint32_t kV>
inline void add_values(const Unit& u, const abi::AttentionParams& p, uint32_t chunk,
                       float (&acc)[kMostTiles][2][4]) {
  const uint32_t warp = threadIdx.x / kWarp, j = threadIdx.x % 4, n = p.v.head_dim;
  const unsigned char* const stage = u.stage(chunk);
  const Rows& rows = u.state();
#pragma unroll
  for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
    const uint32_t column = (tile * u.plan.warps + warp) * 16;
    if (column >= n) break;
    float c[2][4] = {};
    uint32_t block = 0;
    if constexpr (abi::kv_is_native(kV)) {
      block = u.plan.v_blocks == 1 ? 0 : scale_block_of(n, column);
      sum_levels<kV>(u, block, stage, column, c);
    } else if constexpr (is_half_format(kV)) {
      const bool look = rows.hidden != 0, bad = sum_halves<kV>(u, stage, column, look, c);
      if (look && __any_sync(kAll, bad) != 0) {
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) c[i / 4][i % 4] = 0;
        sum_one_by_one<kV>(u, p, chunk, column, c);
      }
    } else {
      sum_one_by_one<kV>(u, p, chunk, column, c);
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= u.plan.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = 8 * t + 2 * j + i % 2;
        const float2 f = u.factors()[block * u.plan.rows + row];
        acc[tile][t][i] = acc[tile][t][i] * rows.keep[row] + c[t][i] * f.x * f.y;
      }
    }
  }
}

}  // namespace gyre::cuda
