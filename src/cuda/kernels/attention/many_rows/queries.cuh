#pragma once
// Attention of many rows: queries from global memory to the operand of the scores, a warp to a row.
#include "cuda/kernels/attention/common/key_words.cuh"
#include "cuda/kernels/attention/common/query_values.cuh"
#include "cuda/kernels/attention/many_rows/operand_scale.cuh"
#include "cuda/kernels/attention/many_rows/traits.cuh"

namespace gyre::cuda {

// The largest magnitude of a query, as an exponent of two: f16 ends below 2^16; bf16 has f32's
// range, and its products with large keys must not leave it.
template <class T>
constexpr int32_t kQueryExponent = T::kBf16K ? 0 : 14;

// A lane has eight coordinates of a row, two times four neighbours: those of its chunk of the
// operand's row. As many lanes as a row has chunks, up to a power of two, take a row.
template <class T>
class LaneQuery {
 public:
  static constexpr uint32_t kChunks = T::kKDim / 8,
                            kLanes = kChunks <= 8 ? 8 : (kChunks <= 16 ? 16 : 32);
  // Levels come as they are unpacked. A chunk's two fours lie one behind the other; as integers
  // some formats' lie in turn.
  static constexpr bool kInTurn = T::kLevelsK && abi::kv_has_magnitudes(T::kK);

  static uint32_t chunk() { return threadIdx.x % kLanes; }
  static uint32_t first(uint32_t four) {
    if constexpr (T::kLevelsK)
      return key_coordinate<T::kK>(chunk() / 4, chunk() % 4, four == 0 ? 0 : (kInTurn ? 1 : 4));
    return chunk() * 8 + four * 4;
  }
  // A bit for each of the lane's coordinates that rotation flips.
  static uint32_t signs() {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 8 && T::kLevelsK; ++i)
      bits |= abi::kv_sign_bit(first(i / 4) + i % 4) << i;
    return bits;
  }

  // A word of each sector that load() reads: it finds them in L1. Registers for all rows at once
  // would be too many.
  static uint32_t touch(uint64_t from, uint32_t dtype) {
    if (chunk() >= kChunks) return 0;
    return load_bits(from, first(0), dtype == 0) | load_bits(from, first(1), dtype == 0);
  }
  void load(uint64_t from, uint32_t dtype, bool aligned) {
    if (chunk() >= kChunks) return;
#pragma unroll
    for (uint32_t four = 0; four < 2; ++four) {
      if (aligned && dtype != 0) {
        const uint2 x = *pointer<const uint2>(from + first(four) * 2);
        bits_[four * 4] = x.x & 0xFFFFu, bits_[four * 4 + 1] = x.x >> 16;
        bits_[four * 4 + 2] = x.y & 0xFFFFu, bits_[four * 4 + 3] = x.y >> 16;
      } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          bits_[four * 4 + i] = load_bits(from, first(four) + i, dtype == 0);
      }
    }
  }

  // Rotated over levels and scaled by a power of two, so that the largest magnitude of the row is
  // below 2^(exponent_bound + 1); returns the factor of the row's scores. A negative scale turns
  // the query round: factors are not negative, and never 0.
  float scaled(uint32_t dtype, float logits, uint32_t signs, int32_t exponent_bound,
               float (&x)[8]) const {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x[i] = chunk() < kChunks ? as_float(bits_[i], dtype) : 0.0f;
    if constexpr (T::kLevelsK) rotate(x, signs);
    uint32_t max_bits = 0;  // as bits: numbers that are not finite have the largest
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t magnitude = __float_as_uint(x[i]) & 0x7FFFFFFFu;
      max_bits = magnitude > max_bits ? magnitude : max_bits;
    }
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) {
      const uint32_t other = __shfl_xor_sync(kAll, max_bits, static_cast<int>(by));
      max_bits = other > max_bits ? other : max_bits;
    }
    const float largest = __uint_as_float(max_bits);
    const bool finite = is_finite(largest);
    constexpr int32_t kMaxUp = 100;  // the factor stays a normal number
    int32_t up = largest == 0 || !finite ? 0 : exponent_bound - exponent_of(largest);
    if (up > kMaxUp) up = kMaxUp;
    const float factor = fabsf(logits) * power_of_two(-up);
    const float sign = factor == 0 || !finite ? 0.0f : (logits < 0 ? -1.0f : 1.0f);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x[i] = sign == 0 ? 0.0f : times_power(x[i] * sign, up);
    if (!finite) return __uint_as_float(0x7FC00000u);
    return factor == 0 ? 1.0f : factor;
  }

  // To the operand of 16-bit floats; returns the factor of the row's scores.
  float store(uint32_t dtype, float logits, uint32_t signs, unsigned char* to) const {
    float x[8];
    const float factor = scaled(dtype, logits, signs, kQueryExponent<T>, x);
    const auto pair = [&](uint32_t i) { return pack_16(x[2 * i], x[2 * i + 1], T::kBf16K); };
    if (chunk() < kChunks)
      *reinterpret_cast<uint4*>(to) = make_uint4(pair(0), pair(1), pair(2), pair(3));
    return factor;
  }

 private:
  // Signs, then the transform: its stages over a lane's coordinates, and over lanes.
  static void rotate(float (&x)[8], uint32_t signs) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const float factor = inverse_root(T::kKDim);
      x[i] *= (signs >> i & 1) != 0 ? -factor : factor;
    }
#pragma unroll
    for (uint32_t h = 1; h < 8; h *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        if ((i & h) != 0) continue;
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
    }
#pragma unroll
    for (uint32_t h = 1; h < kLanes; h *= 2) {
      const float sign = (threadIdx.x & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i)
        x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAll, x[i], static_cast<int>(h)));
    }
  }

  uint32_t bits_[8];
};

// Several rows' loads at a time. For the consumer warps.
template <class T>
inline void load_tile_queries(ManyRowsState& state, uint64_t q) {
  using Lane = LaneQuery<T>;
  constexpr uint32_t kTogether = kWarp / Lane::kLanes,
                     kAtOnce = T::kKDim > 128 || T::kGroups == 1 ? 1 : 2;
  const RowTile& tile = state.tile;
  const abi::AttentionParams& p = tile.params;
  const float logits = p.scale * (p.soft_cap == 0 ? kLog2E : 1.0f);
  const bool aligned = (q | p.q_token_stride | p.q_head_stride) % 8 == 0;
  const uint32_t signs = Lane::signs(), group = threadIdx.x / kGroupThreads;
  unsigned char* const to =
      dynamic_shared() + T::kLayout.q + group * panels_of(T::kKDim) * T::kLayout.q_panel;
  // A warp's rows are those that it multiplies.
  const uint32_t begin = threadIdx.x / kWarp % 4 * 16 + threadIdx.x % kWarp / Lane::kLanes;
#pragma unroll 1
  for (uint32_t pass = 0; pass < 16; pass += kTogether * kAtOnce) {
    Lane queries[kAtOnce];
#pragma unroll
    for (uint32_t at = 0; at < kAtOnce; ++at) {
      const uint32_t r = group * kGroupRows + begin + pass + at * kTogether;
      const uint32_t real = r < tile.rows ? r : 0;
      queries[at].load(q + (tile.first_token + tile.token(real)) * p.q_token_stride +
                           tile.head(real) * p.q_head_stride,
                       p.q_dtype, aligned);
    }
#pragma unroll
    for (uint32_t at = 0; at < kAtOnce; ++at) {
      const uint32_t r = begin + pass + at * kTogether;
      const float factor = queries[at].store(
          p.q_dtype, logits, signs, to + operand_byte(T::kLayout.q_panel, r, Lane::chunk()));
      if (Lane::chunk() == 0)
        state.factor[group * kGroupRows + r] = T::kLevelsK ? factor * kOperandUnit : factor;
    }
  }
  fence_operands();
}

}  // namespace gyre::cuda
