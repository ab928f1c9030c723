#pragma once
// A tile of 8 slots whose rows have 128 coordinates, by one warp: a row is 4 lanes, chunk c (8
// coordinates) lies in slot c / 4 of lane c % 4, so that two stages of the transform are shuffles
// and five are registers. Every lane of the warp takes part. Codes meet in the warp's own shared
// memory. Sums and products are those of encode.cuh, in the same order.
#include "cuda/kernels/pack.cuh"
#include "cuda/kernels/tile_address.cuh"
#include "cuda/kernels/tile_shared.cuh"

namespace gyre::cuda {

constexpr uint32_t kWarpSlots = 4, kRowLanes = 4;
constexpr uint32_t kWarpStride = 160;  // bytes from row to row: four rows meet different banks
constexpr uint32_t kWarpTileBytes = abi::kKvTile * kWarpStride;
static_assert(kBlockThreads / 32 * kWarpTileBytes <= sizeof(TileShared));

// Signs of two coordinates a word, where two halves have them: chunk c is words [4 c, 4 c + 4).
struct SignWords {
  uint32_t of[kWarpDim / 2];
};
constexpr SignWords native_sign_words() {
  SignWords signs{};
  for (uint32_t j = 0; j < kWarpDim; ++j)
    signs.of[j / 2] |= abi::kv_sign_bit(j) << (j % 2 == 0 ? 15 : 31);
  return signs;
}
__device__ constexpr SignWords kNativeSignWords = native_sign_words();

// A chunk with its signs, from a multiple of 16 bytes on.
template <class T>
__device__ void load_flipped_chunk(const T* from, uint32_t chunk, float (&y)[kChunk]) {
  Words<T, kChunk> words;
  Words<Half, kChunk> signs;
  load_wide<kChunk>(from + chunk * kChunk, 0, words);
  load_wide<kChunk>(reinterpret_cast<const Half*>(kNativeSignWords.of) + chunk * kChunk, 0, signs);
#pragma unroll
  for (uint32_t i = 0; i < words.kWords; ++i) {
    if constexpr (sizeof(T) == 2) {
      words.of[i] ^= signs.of[i];
    } else {
      words.of[i] ^= (i % 2 == 0 ? signs.of[i / 2] << 16 : signs.of[i / 2]) & 0x80000000u;
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) y[i] = words.element(i);
}

struct WarpTile {
  uint32_t slot;  // of the tile: the lane's row
  uint32_t lane;  // of the row

  __device__ WarpTile() : slot(threadIdx.x % 32 / kRowLanes), lane(threadIdx.x % kRowLanes) {}
};

using WarpRow = float[kWarpSlots][kChunk];

__device__ inline void warp_stage(uint32_t lane, uint32_t step, WarpRow& y) {
  const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i)
      y[s][i] =
          __fmaf_rn(y[s][i], sign, __shfl_xor_sync(kAllLanes, y[s][i], static_cast<int>(step)));
  }
}

__device__ inline void warp_transform(uint32_t lane, WarpRow& y) {
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) stage_inside<4>(y[s]);
  warp_stage(lane, 1, y);
  warp_stage(lane, 2, y);
#pragma unroll
  for (uint32_t i = 0; i < kChunk; ++i) {
    butterfly(y[0][i], y[1][i]), butterfly(y[2][i], y[3][i]);
    butterfly(y[0][i], y[2][i]), butterfly(y[1][i], y[3][i]);
  }
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) stage_inside<1>(y[s]), stage_inside<2>(y[s]);
}

// A slot is a quarter, two lanes a group of it.
__device__ inline float warp_sum_squares(const WarpRow& y) {
  float even[kWarpSlots], odd[kWarpSlots];
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) {
    const float(&v)[kChunk] = y[s];
    even[s] = (v[0] * v[0] + v[2] * v[2]) + (v[1] * v[1] + v[3] * v[3]);
    odd[s] = (v[4] * v[4] + v[6] * v[6]) + (v[5] * v[5] + v[7] * v[7]);
    even[s] = even[s] + __shfl_xor_sync(kAllLanes, even[s], 2);
    odd[s] = odd[s] + __shfl_xor_sync(kAllLanes, odd[s], 2);
  }
  const float low = (even[0] + even[2]) + (even[1] + even[3]);
  const float high = (odd[0] + odd[2]) + (odd[1] + odd[3]);
  const float all_low = low + __shfl_xor_sync(kAllLanes, low, 1);
  return all_low + (high + __shfl_xor_sync(kAllLanes, high, 1));
}

// Bits of the largest magnitude; a NaN may be left out.
__device__ inline uint32_t warp_largest(const WarpRow& y) {
  float largest = 0;
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i) largest = fmaxf(largest, fabsf(y[s][i]));
  }
  uint32_t bits = __float_as_uint(largest);
  bits = larger_of(bits, __shfl_xor_sync(kAllLanes, bits, 1));
  return larger_of(bits, __shfl_xor_sync(kAllLanes, bits, 2));
}

struct WarpCodes {
  uint32_t codes[kWarpSlots][2];
  uint32_t scale;
};

// y: transformed. power: of two, what the row has lost.
template <uint32_t kFormat>
__device__ void warp_code(const WarpRow& y, float sum, float stretch, float power, WarpCodes& out) {
  const float energy = sum * (1.0f / static_cast<float>(kWarpDim));
  const float root =
      abi::kv_has_magnitudes(kFormat) ? __fsqrt_rn(energy) : __uint_as_float(warp_largest(y));
  const float factor = __fdiv_rn(abi::kv_codec(kFormat).gain, root);
  uint32_t squares = 0;
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s)
    squares += code_chunk<kFormat>(y[s], factor, out.codes[s]);
  squares += __shfl_xor_sync(kAllLanes, squares, 1);
  squares += __shfl_xor_sync(kAllLanes, squares, 2);
  const float levels = static_cast<float>(static_cast<int>(squares));
  out.scale = scale_bits(__fsqrt_rn(__fdiv_rn(energy, levels)) * stretch * 0x1p31f * power);
}

template <class Row>
__device__ void load_warp_row(const Row& row, uint32_t lane, WarpRow& y) {
  row.visit([&](const auto* from) {
#pragma unroll
    for (uint32_t s = 0; s < kWarpSlots; ++s) load_flipped_chunk(from, s * kRowLanes + lane, y[s]);
  });
}

// Codes to the row's bytes in shared memory.
__device__ inline void put_warp_codes(const WarpCodes& made, uint32_t lane, uint8_t* row) {
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s)
    *reinterpret_cast<uint2*>(row + (s * kRowLanes + lane) * kChunk) =
        make_uint2(made.codes[s][0], made.codes[s][1]);
}

// Rows out of range, once more: the scale, and codes instead of what was there. The others of the
// warp only take part.
template <uint32_t kFormat, class Row>
__device__ __noinline__ uint32_t warp_extreme(Row row, bool extreme, float stretch,
                                              uint8_t* row_codes) {
  const uint32_t lane = threadIdx.x % kRowLanes;
  WarpRow y;
  load_warp_row(row, lane, y);
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) {
#pragma unroll
    for (uint32_t i = 0; i < kChunk; ++i)
      largest = larger_of(largest, __float_as_uint(y[s][i]) & 0x7FFFFFFFu);
  }
  largest = larger_of(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = larger_of(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  const int exponent = lost_exponent(largest);
#pragma unroll
  for (uint32_t s = 0; s < kWarpSlots; ++s) lose_exponent(exponent, y[s]);
  warp_transform(lane, y);
  WarpCodes made;
  warp_code<kFormat>(y, warp_sum_squares(y), stretch, power_of_two(exponent), made);
  if (largest == 0 || largest >= 0x7F800000u) {
    made.scale = largest == 0 ? 0u : uint32_t{abi::kKvScaleNaN};
#pragma unroll
    for (uint32_t s = 0; s < kWarpSlots; ++s)
      made.codes[s][0] = made.codes[s][1] = kZeroCodes<kFormat>;
  }
  if (extreme) put_warp_codes(made, lane, row_codes);
  return made.scale;
}

// The scale; codes go to shared memory.
template <uint32_t kFormat, class Row>
__device__ uint32_t warp_encode(const Row& row, uint32_t lane, float stretch, uint8_t* row_codes) {
  WarpRow y;
  WarpCodes made;
  load_warp_row(row, lane, y);
  warp_transform(lane, y);
  const float sum = warp_sum_squares(y);
  warp_code<kFormat>(y, sum, stretch, 1.0f, made);
  put_warp_codes(made, lane, row_codes);
  const bool extreme = row.present() && !in_range(sum);
  uint32_t scale = made.scale;
  if (__any_sync(kAllLanes, extreme ? 1 : 0) != 0) {
    const uint32_t other = warp_extreme<kFormat>(row, extreme, stretch, row_codes);
    if (extreme) scale = other;
  }
  return scale;
}

// Bit r of the result is bit 4 r of rows that present lanes are part of.
__device__ inline uint32_t written_slots(bool present) {
  uint32_t bits = __ballot_sync(kAllLanes, present ? 1 : 0) & 0x11111111u;
  bits = (bits | bits >> 3) & 0x03030303u;
  bits = (bits | bits >> 6) & 0x000F000Fu;
  return (bits | bits >> 12) & 0xFFu;
}

// Whether the warp takes the tile: every address is a multiple of 16.
__device__ inline bool is_warp_tile(const abi::KvCacheLayout& cache, uint64_t source_bits,
                                    uint64_t codes, uint64_t scales) {
  const auto low = [](uint64_t bits) { return static_cast<uint32_t>(bits); };
  const uint32_t bits = low(source_bits) | low(codes) | low(scales) | low(cache.codes_head_stride) |
                        low(cache.codes_tile_stride) / abi::kKvTile |
                        low(cache.scales_head_stride) | low(cache.scales_tile_stride);
  return cache.head_dim == kWarpDim && (bits & 15) == 0;
}

template <uint32_t kFormat, class Row>
__device__ void quantize_warp_tile(TileShared& shared, const abi::KvCacheLayout& cache,
                                   const TileAddress& address, const Row& row) {
  const WarpTile me;
  const float stretch = cache.role == kRoleV ? abi::kv_codec(kFormat).value_stretch : 1.0f;
  uint8_t* const codes = reinterpret_cast<uint8_t*>(&shared) + threadIdx.x / 32 * kWarpTileBytes;
  const uint32_t written = written_slots(row.present());
  if (written == 0) return;
  uint8_t* const row_codes = codes + me.slot * kWarpStride;
  uint32_t scale = 0;
  if constexpr (is_calibrated_row<Row>) {
    constexpr uint32_t kLaneCoordinates = kWarpDim / kRowLanes;
    if (row.present()) {
      row.copy_codes(kWarpDim, me.lane * kLaneCoordinates, kLaneCoordinates, row_codes);
      scale = row.scale(kWarpDim, 0);
    }
  } else {
    scale = warp_encode<kFormat>(row, me.lane, stretch, row_codes);
  }
  __syncwarp();
  if (row.present() && me.lane == 0)
    *reinterpret_cast<uint16_t*>(address.scales + 2 * me.slot) = static_cast<uint16_t>(scale);
  if (cache.role == kRoleV) {
    pack_tile<kFormat>(codes, kWarpStride, kWarpDim, written, threadIdx.x % 32, 32,
                       assume_wide(address.codes));
  } else if (row.present()) {
    pack_row<kFormat>(
        row_codes, kWarpDim, me.lane, kRowLanes,
        assume_wide(address.codes + me.slot * (cache.codes_tile_stride / abi::kKvTile)));
  }
}

}  // namespace gyre::cuda
