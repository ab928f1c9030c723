#pragma once
// Queries into the shape that scores want, and the scores of a chunk: 16 keys to a warp, as the
// rows of a product with the queries as its columns. Where a chunk has fewer than 16 keys for every
// warp, several warps share them and each takes some of the coordinates.
#include "attention_rotation.cuh"
#include "attention_unit.cuh"

namespace gyre::cuda {

// A query becomes 16-bit integers, two bytes each, or two 16-bit floats; either way it is first
// scaled by a power of two, so that its largest coordinate is just below 2^14 or 2^15.
template <uint32_t kK>
constexpr int32_t kQueryTop = abi::kv_is_native(kK) ? 13 : 14;

template <uint32_t kK>
inline void load_queries(const Unit& u, const abi::AttentionParams& p, uint64_t q) {
  const uint32_t n = p.k.head_dim, lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < u.plan.rows; r += u.plan.warps) {
    float* const row = u.wide() + r * n;
    const bool real = r < u.rows;
    const uint64_t from =
        real ? q + u.token(r) * p.q_token_stride + u.head(r) * p.q_head_stride : 0;
    for (uint32_t c = lane; c < n; c += kWarp)
      row[c] = real ? load_as_float(from, p.q_dtype, c) : 0.0f;
    __syncwarp();
    if (!real) {
      if (lane == 0) u.state().factor[r][0] = u.state().factor[r][1] = 1.0f;
      continue;
    }
    rotate<kK>(row, n);
    float largest = 0;
    bool finite = true;
    for (uint32_t c = lane; c < n; c += kWarp) {
      largest = fmaxf(largest, fabsf(row[c]));
      finite = finite && is_finite(row[c]);
    }
    largest = warp_max(largest);
    finite = __all_sync(kAll, finite) != 0;
    if constexpr (is_staged(kK)) {
      const int32_t up = largest == 0 || !finite ? 0 : kQueryTop<kK> - exponent_of(largest);
      for (uint32_t c = lane; c < n; c += kWarp) row[c] = finite ? times_power(row[c], up) : 0.0f;
      if (lane == 0) {
        const float nan = __uint_as_float(0x7FC00000u);
        u.state().factor[r][0] = finite ? power_of_two(-up >> 1) : nan;
        u.state().factor[r][1] = power_of_two(-up - (-up >> 1));
      }
    } else if (lane == 0) {
      u.state().factor[r][0] = u.state().factor[r][1] = 1.0f;
    }
  }
}

// One lane's share of B for 32 coordinates (levels) or 16 (halves): the first part, then what it
// leaves. place: of the lane's eight bytes or four halves.
template <uint32_t kK>
inline uint4 query_fragment(const float* row, uint32_t n, uint32_t step, uint32_t j) {
  uint32_t words[4] = {0, 0, 0, 0};
  if constexpr (abi::kv_is_native(kK)) {
#pragma unroll
    for (uint32_t place = 0; place < 8; ++place) {
      const uint32_t item = item_in_eight<kK>(place);
      const uint32_t c = step * 32 + 4 * j + item % 4 + item / 4 * 16;
      const int32_t x = c < n ? __float2int_rn(row[c]) : 0;
      const int32_t high = (x + 128) >> 8, low = x - high * 256;
      words[place / 4] |= (static_cast<uint32_t>(high) & 255u) << (place % 4 * 8);
      words[2 + place / 4] |= (static_cast<uint32_t>(low) & 255u) << (place % 4 * 8);
    }
  } else {
    using T = typename HalfType<kK>::type;
#pragma unroll
    for (uint32_t place = 0; place < 4; ++place) {
      const uint32_t c = step / 2 * 32 + 8 * j + step % 2 * 4 + place;
      const float x = c < n ? row[c] : 0.0f;
      const TwoParts<T> part(x);
      words[place / 2] |= static_cast<uint32_t>(part.first.bits) << (place % 2 * 16);
      words[2 + place / 2] |= static_cast<uint32_t>(part.rest.bits) << (place % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// [step][8 rows][lane]: a lane's words side by side.
template <uint32_t kK>
inline void make_fragments(const Unit& u, uint32_t n) {
  if constexpr (is_staged(kK)) {
    const uint32_t eights = u.plan.rows / 8;
    const uint32_t steps = round_up(n, 32) / (abi::kv_is_native(kK) ? 32 : 16);
    auto* const out = reinterpret_cast<uint4*>(u.shared() + u.plan.q);
    for (uint32_t i = threadIdx.x; i < steps * eights * kWarp; i += blockDim.x) {
      const uint32_t lane = i % kWarp, row = i / kWarp % eights * 8 + lane / 4;
      out[i] = query_fragment<kK>(u.wide() + row * n, n, i / kWarp / eights, lane % 4);
    }
  } else {
    auto* const out = reinterpret_cast<float*>(u.shared() + u.plan.q);
    for (uint32_t i = threadIdx.x; i < n * u.plan.rows; i += blockDim.x) out[i] = u.wide()[i];
  }
}

// Keys [16 of, 16 of + 16) of the chunk; of the coordinates what is this part's.
struct KeyTile {
  uint32_t of, part;
};

template <uint32_t kK>
inline void score_levels(const Unit& u, uint32_t n, const unsigned char* stage, KeyTile tile,
                         float (&s)[2][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4, eights = u.plan.rows / 8;
  const uint8_t* const row = stage + (tile.of * 16 + g) * u.plan.k_pitch;
  const uint8_t* const row8 = row + 8 * u.plan.k_pitch;
  const uint8_t* const scales = stage + u.plan.k_scales + tile.of * 2 * u.plan.k_blocks * 16;
  const auto* const q = reinterpret_cast<const uint4*>(u.shared() + u.plan.q) + lane;
  const uint32_t whole = whole_groups<kK>(n);
  uint32_t begin = 0;
  for (uint32_t b = 0; b < u.plan.k_blocks; ++b) {
    uint32_t size = abi::kKvScaleBlock;  // largest power of two that is left
    while (size > n - begin) size /= 2;
    const uint32_t end = begin + size;
    int32_t high[2][4] = {}, low[2][4] = {};
#pragma unroll 1
    for (uint32_t step = begin / 32; step * 32 < end; ++step) {
      if ((step & (u.plan.parts - 1)) != tile.part) continue;  // parts: a power of two
      Levels8 x, y;
      if (step * 32 >= begin && step * 32 + 32 <= (end < whole ? end : whole)) {
        x = key_levels<kK>(row, n, step, j), y = key_levels<kK>(row8, n, step, j);
      } else {
        x = key_levels_within<kK>(row, n, step * 32 + 4 * j, begin, end);
        y = key_levels_within<kK>(row8, n, step * 32 + 4 * j, begin, end);
      }
      const uint32_t a[4] = {x.first, y.first, x.second, y.second};
#pragma unroll
      for (uint32_t t = 0; t < 2; ++t) {
        if (t >= eights) break;
        const uint4 w = q[(step * eights + t) * kWarp];
        mma_s8(high[t], a, w.x, w.y);
        mma_s8(low[t], a, w.z, w.w);
      }
    }
    const float scale = raw_scale(scales, b, g) * 0x1p-31f;
    const float scale8 = raw_scale(scales + u.plan.k_blocks * 16, b, g) * 0x1p-31f;
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        s[t][i] += static_cast<float>(high[t][i] * 256 + low[t][i]) * (i < 2 ? scale : scale8);
    }
    begin = end;
  }
}

template <uint32_t kK>
inline void score_halves(const Unit& u, uint32_t n, const unsigned char* stage, KeyTile tile,
                         float (&s)[2][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4, eights = u.plan.rows / 8;
  const unsigned char* const row = stage + (tile.of * 16 + g) * u.plan.k_pitch + j * 16;
  const unsigned char* const row8 = row + 8 * u.plan.k_pitch;
  const auto* const q = reinterpret_cast<const uint4*>(u.shared() + u.plan.q) + lane;
  float low[2][4] = {}, other[2][4] = {};  // sums side by side: a product waits for the one before
  for (uint32_t span = tile.part; span * 32 < n; span += u.plan.parts) {
    const bool inside = span * 32 + j * 8 < n;  // what is beyond a key's end was never written
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 x = inside ? *reinterpret_cast<const uint4*>(row + span * 64) : zero;
    const uint4 y = inside ? *reinterpret_cast<const uint4*>(row8 + span * 64) : zero;
    const uint32_t a[4] = {x.x, y.x, x.y, y.y}, b[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= eights) break;
      const uint4 w = q[(span * 2 * eights + t) * kWarp];
      const uint4 w2 = q[((span * 2 + 1) * eights + t) * kWarp];
      HalfType<kK>::mma(s[t], a, w.x, w.y);
      HalfType<kK>::mma(low[t], a, w.z, w.w);
      HalfType<kK>::mma(other[t], b, w2.x, w2.y);
      HalfType<kK>::mma(low[t], b, w2.z, w2.w);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    s[i / 4][i % 4] = add_rest(s[i / 4][i % 4] + other[i / 4][i % 4], low[i / 4][i % 4]);
}

// Four coordinates of a key that is read where it lies, rotated as it is stored.
template <uint32_t kFormat>
inline float4 load_wide(const uint8_t* row, const float* norms, uint32_t n, uint32_t c) {
  if constexpr (kFormat == kPlanF32) {
    const auto* const x = reinterpret_cast<const float*>(row) + c;
    return make_float4(x[0], x[1], x[2], x[3]);
  } else {
    const float factor = norms[n == 512 ? c / 256 : 0] / compat_unit(n);
    uint32_t code[4];
    for (uint32_t i = 0; i < 4; ++i)
      code[i] = kFormat == abi::kCompat4 ? row[(c + i) / 2] >> (i % 2 * 4) : row[c + i];
    return make_float4(
        compat_centroid<kFormat>(code[0]) * factor, compat_centroid<kFormat>(code[1]) * factor,
        compat_centroid<kFormat>(code[2]) * factor, compat_centroid<kFormat>(code[3]) * factor);
  }
}

// f32 and the compatibility formats: a lane to a key and every second four of this part's
// coordinates. The sums end up where a product's would be.
template <uint32_t kK>
inline void score_wide(const Unit& u, const abi::AttentionParams& p, uint32_t chunk, KeyTile tile,
                       float* out) {
  const uint32_t lane = threadIdx.x % kWarp, key = tile.of * 16 + lane % 16, n = p.k.head_dim;
  const uint64_t at = uint64_t{chunk} * u.plan.chunk + key;
  const bool valid = at < u.walk.tiles * abi::kKvTile && u.walk.valid(at);
  const uint64_t slot = valid ? u.walk.tile(at / abi::kKvTile) * abi::kKvTile + at % 8 : 0;
  const uint8_t* const row = u.k_codes + slot * (p.k.codes_tile_stride / abi::kKvTile);
  const auto* const norms =
      reinterpret_cast<const float*>(u.k_scales + slot * (p.k.scales_tile_stride / abi::kKvTile));
  for (uint32_t first = 0; first < u.plan.rows; first += 8) {
    const float* const q = reinterpret_cast<const float*>(u.shared() + u.plan.q) + first * n;
    float s[8] = {};
    for (uint32_t c = (tile.part * 2 + lane / 16) * 4; c < n && valid; c += u.plan.parts * 8) {
      const float4 k = load_wide<kK>(row, norms, n, c);
#pragma unroll
      for (uint32_t r = 0; r < 8; ++r) {
        const float* const x = q + r * n + c;
        s[r] += (x[0] * k.x + x[1] * k.y) + (x[2] * k.z + x[3] * k.w);
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < 8; ++r) {
      s[r] += __shfl_xor_sync(kAll, s[r], 16);
      if (lane < 16) out[(first + r) * u.plan.logits_pitch + key] = s[r];
    }
  }
}

// Scores of the chunk, one plane for each part, [row][key].
template <uint32_t kK>
inline void score_chunk(const Unit& u, const abi::AttentionParams& p, uint32_t chunk) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t part = warp & (u.plan.parts - 1), step = u.plan.warps / u.plan.parts;
  float* const out = u.logits() + part * u.plan.rows * u.plan.logits_pitch;
#pragma unroll 1
  for (uint32_t of = warp / u.plan.parts; of < u.plan.chunk / 16; of += step) {
    if constexpr (!is_staged(kK)) {
      score_wide<kK>(u, p, chunk, {of, part}, out);
      continue;
    }
    const unsigned char* const stage = u.stage(chunk);
    float s[2][4] = {};
    if constexpr (abi::kv_is_native(kK)) {
      score_levels<kK>(u, p.k.head_dim, stage, {of, part}, s);
    } else if constexpr (is_half_format(kK)) {
      score_halves<kK>(u, p.k.head_dim, stage, {of, part}, s);
    }
    const uint32_t key = of * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= u.plan.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        out[(8 * t + row + i % 2) * u.plan.logits_pitch + key + i / 2 * 8] = s[t][i];
    }
  }
}

}  // namespace gyre::cuda
