#pragma once
// Prefill attention: queries to MMA operands, and the scores of a stage. 16 keys per warp are the A
// operand, queries fill B. Where a stage has fewer than 16 keys for every warp, several warps share
// them, and each takes some of the coordinates.
#include "cuda/kernels/attention/any/prefill_problem.cuh"
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/rotate_row.cuh"
#include "cuda/kernels/attention/common/typed_memory.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// A query becomes 16-bit integers, two bytes each, or two 16-bit floats; either way it is first
// scaled by a power of two, so that its largest coordinate is just below 2^14 or 2^15.
template <uint32_t kK>
constexpr int32_t kQueryExponent = abi::kv_is_native(kK) ? 13 : 14;

template <uint32_t kK>
inline void load_queries(const PrefillProblem& problem, uint64_t q) {
  const abi::AttentionParams& p = problem.params;
  const uint32_t n = p.k.head_dim, lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < problem.layout.rows; r += problem.layout.warps) {
    float* const row = problem.staging() + r * n;
    const bool real = r < problem.rows;
    const uint64_t from = real ? q + (problem.first_token + problem.token(r)) * p.q_token_stride +
                                     problem.head(r) * p.q_head_stride
                               : 0;
    for (uint32_t c = lane; c < n; c += kWarp)
      row[c] = real ? load_as_float(from, p.q_dtype, c) : 0.0f;
    __syncwarp();
    if (!real) {
      if (lane == 0) problem.state().factor[r][0] = problem.state().factor[r][1] = 1.0f;
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
      const int32_t up = largest == 0 || !finite ? 0 : kQueryExponent<kK> - exponent_of(largest);
      for (uint32_t c = lane; c < n; c += kWarp) row[c] = finite ? times_power(row[c], up) : 0.0f;
      if (lane == 0) {
        const float nan = __uint_as_float(0x7FC00000u);
        problem.state().factor[r][0] = finite ? power_of_two(-up >> 1) : nan;
        problem.state().factor[r][1] = power_of_two(-up - (-up >> 1));
      }
    } else if (lane == 0) {
      problem.state().factor[r][0] = problem.state().factor[r][1] = 1.0f;
    }
  }
}

// One lane's B fragment for 32 coordinates (levels) or 16 (16-bit floats): upper bytes or hi, then
// lower bytes or lo.
template <uint32_t kK>
inline uint4 query_fragment(const float* row, uint32_t n, uint32_t step, uint32_t j) {
  uint32_t words[4] = {0, 0, 0, 0};
  if constexpr (abi::kv_is_native(kK)) {
#pragma unroll
    for (uint32_t place = 0; place < 8; ++place) {
      const uint32_t c = key_coordinate<kK>(step, j, place);
      const int32_t x = c < n ? __float2int_rn(row[c]) : 0;
      const int32_t high = (x + 128) >> 8, low = x - high * 256;
      words[place / 4] |= (static_cast<uint32_t>(high) & 255u) << (place % 4 * 8);
      words[2 + place / 4] |= (static_cast<uint32_t>(low) & 255u) << (place % 4 * 8);
    }
  } else {
    using T = typename Float16Type<kK>::type;
#pragma unroll
    for (uint32_t place = 0; place < 4; ++place) {
      const uint32_t c = step / 2 * 32 + 8 * j + step % 2 * 4 + place;
      const HiLo<T> x(c < n ? row[c] : 0.0f);
      words[place / 2] |= static_cast<uint32_t>(x.hi.bits) << (place % 2 * 16);
      words[2 + place / 2] |= static_cast<uint32_t>(x.lo.bits) << (place % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// [step][8 rows][lane]: a lane's words side by side.
template <uint32_t kK>
inline void make_fragments(const PrefillProblem& problem, uint32_t n) {
  if constexpr (is_staged(kK)) {
    const uint32_t row_tiles = problem.layout.rows / 8;
    const uint32_t steps =
        abi::kv_is_native(kK) ? round_up(n, key_span(kK)) / 32 : round_up(n, 32) / 16;
    auto* const out = reinterpret_cast<uint4*>(problem.shared() + problem.layout.q);
    for (uint32_t i = threadIdx.x; i < steps * row_tiles * kWarp; i += blockDim.x) {
      const uint32_t lane = i % kWarp, row = i / kWarp % row_tiles * 8 + lane / 4;
      out[i] = query_fragment<kK>(problem.staging() + row * n, n, i / kWarp / row_tiles, lane % 4);
    }
  } else {
    auto* const out = reinterpret_cast<float*>(problem.shared() + problem.layout.q);
    for (uint32_t i = threadIdx.x; i < n * problem.layout.rows; i += blockDim.x)
      out[i] = problem.staging()[i];
  }
}

// Keys [16 of, 16 of + 16) of the stage; of the coordinates what is this part's.
struct KeyTile {
  uint32_t of, part;
};

// Whole groups of every plane of K end here; what follows is unpacked code by code.
template <uint32_t kFormat>
constexpr uint32_t whole_groups(uint32_t head_dim) {
  constexpr uint32_t kHigh = abi::kv_high_bits(kFormat), kLow = abi::kv_low_bits(kFormat);
  constexpr uint32_t kGroup = abi::kv_group(kHigh != 0 && kHigh < kLow ? kHigh : kLow);
  constexpr uint32_t kUnit = kGroup < 32 ? 32 : kGroup;
  if (kHigh != 0 && head_dim * kLow / 8 % 4 != 0) return 0;  // a plane that begins inside a word
  return head_dim / kUnit * kUnit;
}

// Int8 levels of a step of one key, four per word.
struct KeyLevels {
  uint32_t first, second;
};
template <uint32_t kK>
inline KeyLevels key_levels(const uint8_t* row, uint32_t n, uint32_t step, uint32_t j) {
  const Operands<1> x = KeyWords<kK>(row, n, step, j).operands(level_table<kK, true>(), step);
  return {signed_levels<kK>(x.term[0][0]), signed_levels<kK>(x.term[0][1])};
}

// As above, for any head_dim; coordinates outside [begin, end) count as 0.
template <uint32_t kK>
inline KeyLevels key_levels_within(const uint8_t* row, uint32_t n, uint32_t step, uint32_t j,
                                   uint32_t begin, uint32_t end) {
  uint64_t words = 0;
#pragma unroll 1
  for (uint32_t place = 0; place < 8; ++place) {
    const uint32_t c = key_coordinate<kK>(step, j, place);
    if (c < begin || c >= end) continue;
    const int32_t level = level_of<kK>(key_code<kK>(row, n, c));
    words |= static_cast<uint64_t>(level & 255) << (place * 8);
  }
  return {static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)};
}

// Adds the scores over one scale block, coordinates [begin, end).
template <uint32_t kK>
inline void score_block(const PrefillProblem& problem, const unsigned char* stage, KeyTile tile,
                        uint32_t block, uint32_t begin, uint32_t end, float (&s)[2][4]) {
  constexpr uint32_t kSpan = key_span(kK), kSteps = kSpan / 32;
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4,
                 row_tiles = problem.layout.rows / 8;
  const uint32_t n = problem.params.k.head_dim, whole = whole_groups<kK>(n);
  const uint8_t* const row = stage + (tile.of * 16 + g) * problem.layout.k_pitch;
  const uint8_t* const row8 = row + 8 * problem.layout.k_pitch;
  const auto* const q = reinterpret_cast<const uint4*>(problem.shared() + problem.layout.q) + lane;
  int32_t high[2][4] = {}, low[2][4] = {};
#pragma unroll 1
  for (uint32_t step = begin / kSpan * kSteps; step / kSteps * kSpan < end; ++step) {
    if ((step & (problem.layout.warps_per_key - 1)) != tile.part) continue;  // a power of two
    const uint32_t first = step / kSteps * kSpan;
    KeyLevels x, y;
    if (first >= begin && first + kSpan <= (end < whole ? end : whole)) {
      x = key_levels<kK>(row, n, step, j), y = key_levels<kK>(row8, n, step, j);
    } else {
      x = key_levels_within<kK>(row, n, step, j, begin, end);
      y = key_levels_within<kK>(row8, n, step, j, begin, end);
    }
    const uint32_t a[4] = {x.first, y.first, x.second, y.second};
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= row_tiles) break;
      const uint4 w = q[(step * row_tiles + t) * kWarp];
      mma_s8(high[t], a, w.x, w.y);
      mma_s8(low[t], a, w.z, w.w);
    }
  }
  const uint8_t* const scales =
      stage + problem.layout.k_scales + tile.of * 2 * problem.layout.k_blocks * 16;
  const float scale = raw_scale(scales, block, g) * 0x1p-31f;
  const float scale8 = raw_scale(scales + problem.layout.k_blocks * 16, block, g) * 0x1p-31f;
#pragma unroll
  for (uint32_t t = 0; t < 2; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      s[t][i] += static_cast<float>(high[t][i] * 256 + low[t][i]) * (i < 2 ? scale : scale8);
  }
}

template <uint32_t kK>
inline void score_levels(const PrefillProblem& problem, const unsigned char* stage, KeyTile tile,
                         float (&s)[2][4]) {
  const uint32_t n = problem.params.k.head_dim;
  uint32_t begin = 0;
  for (uint32_t b = 0; b < problem.layout.k_blocks; ++b) {
    uint32_t size = abi::kKvScaleBlock;  // largest power of two that is left
    while (size > n - begin) size /= 2;
    score_block<kK>(problem, stage, tile, b, begin, begin + size, s);
    begin += size;
  }
}

template <uint32_t kK>
inline void score_float16(const PrefillProblem& problem, const unsigned char* stage, KeyTile tile,
                          float (&s)[2][4]) {
  const uint32_t lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4,
                 row_tiles = problem.layout.rows / 8;
  const uint32_t n = problem.params.k.head_dim;
  const unsigned char* const row = stage + (tile.of * 16 + g) * problem.layout.k_pitch + j * 16;
  const unsigned char* const row8 = row + 8 * problem.layout.k_pitch;
  const auto* const q = reinterpret_cast<const uint4*>(problem.shared() + problem.layout.q) + lane;
  float low[2][4] = {}, other[2][4] = {};  // independent chains: an MMA waits for the one before
  for (uint32_t span = tile.part; span * 32 < n; span += problem.layout.warps_per_key) {
    const bool inside = span * 32 + j * 8 < n;  // what is beyond a key's end was never written
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 x = inside ? *reinterpret_cast<const uint4*>(row + span * 64) : zero;
    const uint4 y = inside ? *reinterpret_cast<const uint4*>(row8 + span * 64) : zero;
    const uint32_t a[4] = {x.x, y.x, x.y, y.y}, b[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= row_tiles) break;
      const uint4 w = q[(span * 2 * row_tiles + t) * kWarp];
      const uint4 w2 = q[((span * 2 + 1) * row_tiles + t) * kWarp];
      Float16Type<kK>::mma(s[t], a, w.x, w.y);
      Float16Type<kK>::mma(low[t], a, w.z, w.w);
      Float16Type<kK>::mma(other[t], b, w2.x, w2.y);
      Float16Type<kK>::mma(low[t], b, w2.z, w2.w);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    s[i / 4][i % 4] = add_lo(s[i / 4][i % 4] + other[i / 4][i % 4], low[i / 4][i % 4]);
}

// Four coordinates of a key that is read from global memory, rotated as it is stored.
template <uint32_t kFormat>
inline float4 load_four(const uint8_t* row, const float* norms, uint32_t n, uint32_t c,
                        float unit) {
  if constexpr (kFormat == kFormatF32) {
    const auto* const x = reinterpret_cast<const float*>(row) + c;
    return make_float4(x[0], x[1], x[2], x[3]);
  } else {
    const float factor = norms[n == 512 ? c / 256 : 0] / unit;
    const auto value = [&](uint32_t i) {
      return mlx_native_centroid<kFormat>(mlx_native_stored_code(kFormat, row, c + i)) * factor;
    };
    return make_float4(value(0), value(1), value(2), value(3));
  }
}

// f32 and mlx-native's formats: a lane per key and every second four of this part's coordinates.
// Scores go where those of an MMA would.
template <uint32_t kK>
inline void score_global(const PrefillProblem& problem, uint32_t index, KeyTile tile, float* out) {
  const abi::AttentionParams& p = problem.params;
  const uint32_t lane = threadIdx.x % kWarp, key = tile.of * 16 + lane % 16, n = p.k.head_dim;
  const uint64_t at = uint64_t{index} * problem.layout.stage_keys + key;
  const bool valid = problem.holds_key(at);
  const uint8_t* const row =
      problem.k_codes + (valid ? problem.row_offset(at, p.k.codes_tile_stride) : 0);
  const auto* const norms = reinterpret_cast<const float*>(
      problem.k_scales + (valid ? problem.row_offset(at, p.k.scales_tile_stride) : 0));
  const float unit = mlx_native_unit(p.k);
  for (uint32_t first = 0; first < problem.layout.rows; first += 8) {
    const float* const q =
        reinterpret_cast<const float*>(problem.shared() + problem.layout.q) + first * n;
    float s[8] = {};
    for (uint32_t c = (tile.part * 2 + lane / 16) * 4; c < n && valid;
         c += problem.layout.warps_per_key * 8) {
      const float4 k = load_four<kK>(row, norms, n, c, unit);
#pragma unroll
      for (uint32_t r = 0; r < 8; ++r) {
        const float* const x = q + r * n + c;
        s[r] += (x[0] * k.x + x[1] * k.y) + (x[2] * k.z + x[3] * k.w);
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < 8; ++r) {
      s[r] += __shfl_xor_sync(kAll, s[r], 16);
      if (lane < 16) out[(first + r) * problem.layout.logits_pitch + key] = s[r];
    }
  }
}

// Scores of the stage, one plane for each part, [row][key].
template <uint32_t kK>
inline void score_stage(const PrefillProblem& problem, uint32_t index) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t part = warp & (problem.layout.warps_per_key - 1),
                 step = problem.layout.warps / problem.layout.warps_per_key;
  float* const out = problem.logits() + part * problem.layout.rows * problem.layout.logits_pitch;
#pragma unroll 1
  for (uint32_t of = warp / problem.layout.warps_per_key; of < problem.layout.stage_keys / 16;
       of += step) {
    if constexpr (!is_staged(kK)) {
      score_global<kK>(problem, index, {of, part}, out);
      continue;
    }
    const unsigned char* const stage = problem.stage(index);
    float s[2][4] = {};
    if constexpr (abi::kv_is_native(kK)) {
      score_levels<kK>(problem, stage, {of, part}, s);
    } else if constexpr (is_float16_format(kK)) {
      score_float16<kK>(problem, stage, {of, part}, s);
    }
    const uint32_t key = of * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      if (t >= problem.layout.rows / 8) break;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        out[(8 * t + row + i % 2) * problem.layout.logits_pitch + key + i / 2 * 8] = s[t][i];
    }
  }
}

}  // namespace gyre::cuda
