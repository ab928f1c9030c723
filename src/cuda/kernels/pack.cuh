#pragma once
// Codes, a byte each, to planes of bits (docs/kv_formats.md, "Bytes"). attention/common/unpack.cuh
// reads them.
#include "abi/kv_codec.h"
#include "cuda/kernels/words.cuh"

namespace gyre::cuda {

template <uint32_t kBits>
inline constexpr uint32_t kFieldBytes = ((1u << kBits) - 1) * 0x01010101u;

// A plane of a row of K: bits [kShift, kShift + kBits) of the codes. Lane `lane` of `lanes` takes
// every lanes-th group.
template <uint32_t kBits, uint32_t kShift>
__device__ void pack_row_plane(const uint8_t* codes, uint32_t head_dim, uint32_t lane,
                               uint32_t lanes, uint8_t* plane) {
  constexpr uint32_t kGroup = abi::kv_group(kBits), kPerByte = 8 / kBits;
  const uint32_t groups = head_dim / kGroup;
  for (uint32_t before = 0; before < groups; before += lanes) {  // as often for every lane
    const uint32_t g = before + lane;
    if (g >= groups) break;
    uint32_t words[4] = {};
#pragma unroll
    for (uint32_t k = 0; k < kPerByte; ++k) {
      const uint4 in = *reinterpret_cast<const uint4*>(codes + g * kGroup + 16 * k);
      const uint32_t of[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        words[i] |= (of[i] >> kShift & kFieldBytes<kBits>) << (kBits * k % 8);
    }
    store_words(words, plane + 16 * g);
  }
  const uint32_t remainder = head_dim - groups * kGroup, bytes = remainder * kBits / 8;
  for (uint32_t j = lane; j < bytes; j += lanes) {
    uint32_t byte = 0;
    for (uint32_t k = 0; k < kPerByte; ++k) {
      const uint32_t code = codes[groups * kGroup + j + k * bytes];
      byte |= (code >> kShift & ((1u << kBits) - 1)) << (kBits * k);
    }
    plane[16 * groups + j] = static_cast<uint8_t>(byte);
  }
}

template <uint32_t kFormat>
__device__ void pack_row(const uint8_t* codes, uint32_t head_dim, uint32_t lane, uint32_t lanes,
                         uint8_t* row) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  pack_row_plane<kLow, 0>(codes, head_dim, lane, lanes, row);
  if constexpr (kHigh != 0)
    pack_row_plane<kHigh, kLow>(codes, head_dim, lane, lanes,
                                row + abi::kv_plane_bytes(head_dim, kLow));
}

// Byte i of word j becomes byte j of word i.
__device__ inline void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
  w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// Four coordinates of eight tokens, rows[t] a byte each, to a plane of V.
template <uint32_t kBits>
__device__ void pack_quad(const uint32_t (&rows)[8], uint32_t (&words)[kBits]) {
  constexpr uint32_t kPerByte = 8 / kBits;
  uint32_t bytes[kBits];
#pragma unroll
  for (uint32_t i = 0; i < kBits; ++i) {
    bytes[i] = 0;
#pragma unroll
    for (uint32_t k = 0; k < kPerByte; ++k) bytes[i] |= rows[i + k * kBits] << (kBits * k);
  }
  if constexpr (kBits == 1) {
    words[0] = bytes[0];
  } else if constexpr (kBits == 2) {
    words[0] = __byte_perm(bytes[0], bytes[1], 0x5140);
    words[1] = __byte_perm(bytes[0], bytes[1], 0x7362);
  } else if constexpr (kBits == 4) {
    transpose_bytes(bytes);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words[i] = bytes[i];
  } else {
    uint32_t first[4] = {bytes[0], bytes[1], bytes[2], bytes[3]};
    uint32_t last[4] = {bytes[4], bytes[5], bytes[6], bytes[7]};
    transpose_bytes(first), transpose_bytes(last);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words[2 * i] = first[i], words[2 * i + 1] = last[i];
  }
}

// A plane of a tile of V. Tokens that are not in `written` keep their bits.
template <uint32_t kBits, uint32_t kShift>
__device__ void pack_tile_quad(const uint32_t (&codes)[8], uint32_t written, uint8_t* to) {
  constexpr uint32_t kField = kFieldBytes<kBits>;
  uint32_t rows[8], words[kBits];
#pragma unroll
  for (uint32_t t = 0; t < 8; ++t) rows[t] = codes[t] >> kShift & kField;
  pack_quad<kBits>(rows, words);
  if (written != 0xFFu) {
    uint32_t mask[kBits], old[kBits];
#pragma unroll
    for (uint32_t t = 0; t < 8; ++t) rows[t] = (written >> t & 1) != 0 ? kField : 0;
    pack_quad<kBits>(rows, mask);
    load_words(to, old);
#pragma unroll
    for (uint32_t i = 0; i < kBits; ++i) words[i] = (words[i] & mask[i]) | (old[i] & ~mask[i]);
  }
  store_words(words, to);
}

// Rows of codes `stride` bytes apart, by threads [0, threads).
template <uint32_t kFormat>
__device__ void pack_tile(const uint8_t* codes, uint32_t stride, uint32_t head_dim,
                          uint32_t written, uint32_t thread, uint32_t threads, uint8_t* tile) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  for (uint32_t before = 0; before < head_dim / 4;
       before += threads) {  // as often for every thread
    const uint32_t quad = before + thread;
    if (quad >= head_dim / 4) break;
    uint32_t rows[8];
#pragma unroll
    for (uint32_t t = 0; t < 8; ++t)
      rows[t] = *reinterpret_cast<const uint32_t*>(codes + t * stride + 4 * quad);
    pack_tile_quad<kLow, 0>(rows, written, tile + quad * 4 * kLow);
    if constexpr (kHigh != 0)
      pack_tile_quad<kHigh, kLow>(rows, written, tile + head_dim * kLow + quad * 4 * kHigh);
  }
}

// Codes of four coordinates of one token, `slot` of its tile, in a plane of V below 8 bits; other
// bits are 0. A coordinate has kBits bytes, of which the token has one field.
template <uint32_t kBits, uint32_t kShift>
__device__ void token_words(uint32_t codes, uint32_t slot, uint32_t (&words)[kBits]) {
  const uint32_t field = codes >> kShift & kFieldBytes<kBits>;
  const uint32_t shift = slot % kBits * 8 + slot / kBits * kBits;
  if constexpr (kBits == 1) {
    words[0] = field << shift;
  } else if constexpr (kBits == 2) {
    words[0] = __byte_perm(field, 0, 0x4140) << shift;
    words[1] = __byte_perm(field, 0, 0x4342) << shift;
  } else {
    static_assert(kBits == 4);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words[i] = (field >> (8 * i) & 0xFFu) << shift;
  }
}

}  // namespace gyre::cuda
