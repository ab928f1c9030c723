#pragma once
// Codes that a warp has of a row (quad_row.cuh) to their bytes in a cache. Codes of V share words
// with those of seven other tokens; where these may be written at the same time, bits are changed
// one by one. Caches begin at multiples of 8 bytes.
#include "cuda/kernels/dense_row.cuh"
#include "cuda/kernels/pack.cuh"
#include "cuda/kernels/quad_row.cuh"
#include "cuda/kernels/tile_address.cuh"

namespace gyre::cuda {

// Where a row goes.
struct RowTarget {
  bool stored;    // in the cache; sink tokens are not
  bool shared;    // others may write other tokens of the tile
  uint32_t slot;  // of the tile
  TileAddress tile;
  Half* f16;  // in 16 bits, too; null: nowhere
};

// Words of V's tile before the write, for a plane below 8 bits.
template <uint32_t kBits, uint32_t kQuads>
struct OldWords {
  uint32_t of[kQuads][kBits];

  __device__ void load(const QuadLanes<kQuads>& at, const uint8_t* plane) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint8_t* const from = plane + at.begin(q) * kBits;
      if (!at.active(q)) continue;
      if constexpr (kBits == 1) {
        of[q][0] = *reinterpret_cast<const uint32_t*>(from);
      } else {
#pragma unroll
        for (uint32_t i = 0; i < kBits; i += 2) {
          const uint2 two = reinterpret_cast<const uint2*>(from)[i / 2];
          of[q][i] = two.x, of[q][i + 1] = two.y;
        }
      }
    }
  }
};
template <uint32_t kQuads>
struct OldWords<0, kQuads> {
  __device__ void load(const QuadLanes<kQuads>& /*at*/, const uint8_t* /*plane*/) {}
};
template <uint32_t kQuads>
struct OldWords<8, kQuads> {  // codes are whole bytes
  __device__ void load(const QuadLanes<kQuads>& /*at*/, const uint8_t* /*plane*/) {}
};

// Formats that are not native have nothing to load.
template <uint32_t kFormat, uint32_t kQuads, bool kNative = abi::kv_is_native(kFormat)>
struct OldCodes {
  __device__ void load(const QuadLanes<kQuads>& /*at*/, const uint8_t* /*tile*/) {}
};
template <uint32_t kFormat, uint32_t kQuads>
struct OldCodes<kFormat, kQuads, true> {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  OldWords<kLow, kQuads> low;
  OldWords<kHigh, kQuads> high;

  __device__ void load(const QuadLanes<kQuads>& at, const uint8_t* tile) {
    low.load(at, tile);
    high.load(at, tile + at.head_dim * kLow);
  }
};

template <uint32_t kBits, uint32_t kShift, uint32_t kQuads>
__device__ void store_value_plane(const QuadLanes<kQuads>& at, const uint32_t (&codes)[kQuads],
                                  const OldWords<kBits, kQuads>& old, const RowTarget& to,
                                  uint8_t* plane) {
  uint32_t mask[kBits];
  token_words<kBits, 0>(kFieldBytes<kBits>, to.slot, mask);
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    if (!at.active(q)) continue;
    uint32_t words[kBits];
    token_words<kBits, kShift>(codes[q], to.slot, words);
    auto* const words_at = reinterpret_cast<uint32_t*>(plane + at.begin(q) * kBits);
#pragma unroll
    for (uint32_t i = 0; i < kBits; ++i) words[i] ^= old.of[q][i] & mask[i];  // bits that change
    if (to.shared) {
#pragma unroll
      for (uint32_t i = 0; i < kBits; ++i)
        if (words[i] != 0) atomicXor(words_at + i, words[i]);
    } else if constexpr (kBits == 1) {
      *words_at = old.of[q][0] ^ words[0];
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kBits; i += 2)
        reinterpret_cast<uint2*>(words_at)[i / 2] =
            make_uint2(old.of[q][i] ^ words[i], old.of[q][i + 1] ^ words[i + 1]);
    }
  }
}

template <uint32_t kFormat, uint32_t kQuads>
__device__ void store_value_codes(const QuadLanes<kQuads>& at, const uint32_t (&codes)[kQuads],
                                  const OldCodes<kFormat, kQuads>& old, const RowTarget& to) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  if constexpr (kLow == 8) {
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      uint8_t* const bytes = to.tile.codes + at.begin(q) * abi::kKvTile + to.slot;
#pragma unroll
      for (uint32_t i = 0; i < kQuad; ++i)
        if (at.active(q)) bytes[i * abi::kKvTile] = static_cast<uint8_t>(codes[q] >> (8 * i));
    }
  } else {
    store_value_plane<kLow, 0>(at, codes, old.low, to, to.tile.codes);
    if constexpr (kHigh != 0)
      store_value_plane<kHigh, kLow>(at, codes, old.high, to, to.tile.codes + at.head_dim * kLow);
  }
}

// The last group of a plane of K, where it is shorter than the others: a byte to a lane. It lies in
// the last quads of the row.
template <uint32_t kBits, uint32_t kShift, uint32_t kQuads>
__device__ void store_short_group(const QuadLanes<kQuads>& at, const uint32_t (&codes)[kQuads],
                                  uint32_t first, uint8_t* to) {
  const uint32_t bytes = (at.head_dim - first) * kBits / 8;
  uint32_t last = codes[0], byte = 0;
#pragma unroll
  for (uint32_t q = 1; q < kQuads; ++q) last = at.head_dim / kQuadRow == q ? codes[q] : last;
#pragma unroll 1
  for (uint32_t k = 0; k < 8 / kBits; ++k) {
    const uint32_t c = (first + at.lane + k * bytes) % kQuadRow;
    const uint32_t four = __shfl_sync(kAllLanes, last, static_cast<int>(c / kQuad));
    byte |= (four >> (c % kQuad * 8 + kShift) & ((1u << kBits) - 1)) << (kBits * k);
  }
  if (at.lane < bytes) to[at.lane] = static_cast<uint8_t>(byte);
}

// Word w of a group has quads w, w + 4, ... of it.
template <uint32_t kBits, uint32_t kShift, uint32_t kQuads>
__device__ void store_key_plane(const QuadLanes<kQuads>& at, const uint32_t (&codes)[kQuads],
                                uint8_t* plane) {
  constexpr uint32_t kFields = 8 / kBits, kGroup = abi::kv_group(kBits);
  const uint32_t groups = at.head_dim / kGroup, field = at.lane / 4 % kFields;
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    uint32_t word[1] = {(codes[q] >> kShift & kFieldBytes<kBits>) << (kBits * field)};
#pragma unroll
    for (uint32_t step = 4; step < 4 * kFields; step *= 2)
      word[0] |= __shfl_xor_sync(kAllLanes, word[0], static_cast<int>(step));
    const uint32_t group = at.begin(q) / kGroup;
    if (field == 0 && group < groups) store_words(word, plane + 16 * group + at.lane % 4 * 4);
  }
  if (groups * kGroup != at.head_dim)
    store_short_group<kBits, kShift>(at, codes, groups * kGroup, plane + 16 * groups);
}

template <uint32_t kFormat, uint32_t kQuads>
__device__ void store_key_codes(const QuadLanes<kQuads>& at, const uint32_t (&codes)[kQuads],
                                uint8_t* row) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  store_key_plane<kLow, 0>(at, codes, row);
  if constexpr (kHigh != 0)
    store_key_plane<kHigh, kLow>(at, codes, row + abi::kv_plane_bytes(at.head_dim, kLow));
}

template <uint32_t kQuads>
__device__ void store_scales(const QuadLanes<kQuads>& at, const uint32_t (&scale)[kQuads],
                             const RowTarget& to) {
  auto* const scales = reinterpret_cast<uint16_t*>(to.tile.scales);
#pragma unroll
  for (uint32_t q = 0; q < kQuads; ++q) {
    const uint32_t size = least_of(at.size[q], abi::kKvScaleBlock);
    if (at.active(q) && (at.begin(q) & (size - 1)) == 0)
      scales[scale_index(at.head_dim, at.size[q], at.begin(q)) * abi::kKvTile + to.slot] =
          static_cast<uint16_t>(scale[q]);
  }
}

// All lanes of the warp come, with a row that is stored. old: loaded for V.
template <uint32_t kFormat, class Source, uint32_t kQuads>
__device__ void store_quads(const abi::KvCacheLayout& cache, const QuadLanes<kQuads>& at,
                            const RawQuads<Source, kQuads>& raw,
                            const OldCodes<kFormat, kQuads>& old, const RowTarget& to) {
  const bool is_v = cache.role == kRoleV;
  uint8_t* const row = to.tile.codes + to.slot * (cache.codes_tile_stride / abi::kKvTile);
  if constexpr (abi::kv_is_native(kFormat)) {
    uint32_t codes[kQuads], scale[kQuads];
    encode_quads<kFormat>(at, raw, is_v ? abi::kv_codec(kFormat).value_stretch : 1.0f, codes,
                          scale);
    store_scales(at, scale, to);
    if (is_v) {
      store_value_codes<kFormat>(at, codes, old, to);
    } else {
      store_key_codes<kFormat>(at, codes, row);
    }
  } else {
    raw.copy_to(at, reinterpret_cast<DenseType<kFormat>*>(row));
  }
}

}  // namespace gyre::cuda
