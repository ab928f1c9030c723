#pragma once
// Dot products of queries with the keys of a tile, for files compiled with AVX-512's dot product of
// unsigned with signed bytes. All of it anonymous, so that each has its own copy.

#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/prefetch.h"
#include "cpu/attention/isa/quad_keys_avx512.h"
#include "cpu/attention/isa/vnni_products.h"
#include "cpu/attention/isa/weights_x86.h"

namespace gyre::cpu {
namespace {

// In each 128 bits, of a and b in turn: the sum of two lanes.
inline __m512i add_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline __m512i add_quads(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Dot products of kRows queries, hi and lo, with the two quads of a tile of keys. A lane has every
// fourth coordinate of its key.
template <size_t kRows>
struct QuadSums {
  __m512i at[kRows][2][2];

  QuadSums() {
    for (auto& of_row : at) {
      for (auto& of_plane : of_row) of_plane[0] = of_plane[1] = _mm512_setzero_si512();
    }
  }
  // Multiplies a chunk, of which q has the first row's hi.
  void add(const __m512i (&keys)[2], const int8_t* q, size_t plane_stride) {
    for (size_t i = 0; i < 2 * kRows; ++i, q += plane_stride) {
      const __m512i query =
          _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
      add_products(at[i / 2][i % 2][0], keys[0], query);
      add_products(at[i / 2][i % 2][1], keys[1], query);
    }
  }
  // 256 hi + lo of a quad, added up: the 128 bits of a key have a lane for each row.
  __m512i by_key(size_t quad) const {
    const auto row = [&](size_t r) {
      if (r >= kRows) return _mm512_setzero_si512();
      return _mm512_add_epi32(_mm512_slli_epi32(at[r][0][quad], 8), at[r][1][quad]);
    };
    return add_quads(add_pairs(row(0), row(1)), add_pairs(row(2), row(3)));
  }
};

// How a chunk's codes lie in the high plane: in whole groups, in bytes that all chunks share and
// that stand in their places, or anywhere.
enum class HighPlane : uint8_t { whole, repeated, placed };

// The keys of a tile, and the queries they are multiplied with.
template <uint32_t kFormat, size_t kRows, bool kNear>
struct TileProducts {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  static constexpr bool kSigned = kLow == 2 && kHigh == 1;
  static constexpr size_t kLowChunks = 8 / kLow;  // in a group of 16 bytes
  static constexpr size_t kHighChunks = kHigh == 0 ? kLowChunks : 8 / (kHigh == 0 ? 1 : kHigh);
  const ScoreJob& job;
  const QuadTables& tables;
  size_t key_dim;
  const uint8_t* keys;
  const int8_t* q;  // hi of the first row
  QuadSums<kRows> sums;

  void load(size_t at, __m512i (&quads)[2]) const {
    for (size_t i = 0; i < 2; ++i) {
      const uint8_t* const row = keys + at + i * kQuad * job.key_stride;
      quads[i] = kNear ? load_near(row, job.key_stride, tables.near_words)
                       : load_quad(row, job.key_stride);
    }
  }
  void load_two(size_t at, __m512i (&first)[2], __m512i (&second)[2]) const {
    if constexpr (kNear) {
      load(at, first);
      load(at + 16, second);
    } else {
      for (size_t i = 0; i < 2; ++i)
        load_two_quads(keys + at + i * kQuad * job.key_stride, job.key_stride, first[i], second[i]);
    }
  }
  size_t high_plane() const { return key_dim * kLow / 8; }
  // The chunk's number from the first that is not in a whole group.
  size_t past_groups(size_t chunk, size_t group_chunks) const {
    return chunk - key_dim / kChunk / group_chunks * group_chunks;
  }

  // One chunk, the kNth of those that are unrolled, from bytes of both planes.
  template <bool kWholeLow, HighPlane kHighPlane, uint32_t kNth>
  void multiply_chunk(const __m512i (&low)[2], const __m512i (&high)[2], size_t chunk) {
    __m512i operand[2];
    for (size_t i = 0; i < 2; ++i)
      operand[i] = join_planes_of<kWholeLow, kHighPlane, kNth>(low[i], high[i], chunk);
    sums.add(operand, q + chunk * kChunk, job.head_dim);
  }
  template <bool kWholeLow, HighPlane kHighPlane, uint32_t kNth>
  __m512i join_planes_of(__m512i low, __m512i high, size_t chunk) const {
#if defined(__AVX512VBMI__)
    if constexpr (kFormat == abi::kTq3 && kWholeLow && kHighPlane == HighPlane::whole)
      return signed_operand<kFormat, kNth>(low, high);
#endif
    __m512i operand;
    if constexpr (kWholeLow)
      operand = whole_low<kFormat, kNth % kLowChunks>(low);
    else
      operand = placed_low<kFormat>(low, tables.low[past_groups(chunk, kLowChunks)]);
    if constexpr (kHighPlane == HighPlane::whole)
      return add_whole_high<kFormat, kNth>(operand, high, chunk);
    const ChunkPlace& place = tables.high[past_groups(chunk, kHighChunks)];
    if constexpr (kHighPlane == HighPlane::repeated)
      return add_bit<kFormat>(operand, _mm512_test_epi8_mask(high, _mm512_load_si512(place.bit)));
    return add_placed_high<kFormat>(operand, high, place);
  }

  // A group of the low plane, from chunk `chunk` on, of the kNth group that is unrolled.
  template <HighPlane kHighPlane, uint32_t kNth>
  void multiply_group(const __m512i (&high)[2], size_t chunk) {
    __m512i low[2];
    load(chunk / kLowChunks * 16, low);
    multiply_chunk<true, kHighPlane, kNth * kLowChunks>(low, high, chunk);
    if constexpr (kLowChunks >= 2)
      multiply_chunk<true, kHighPlane, kNth * kLowChunks + 1>(low, high, chunk + 1);
    if constexpr (kLowChunks >= 4) {
      multiply_chunk<true, kHighPlane, kNth * kLowChunks + 2>(low, high, chunk + 2);
      multiply_chunk<true, kHighPlane, kNth * kLowChunks + 3>(low, high, chunk + 3);
    }
  }

  // The kNth chunk of a group of magnitudes and signs, chunk `chunk`.
  template <uint32_t kNth>
  void multiply_signed(const SignedNibbles (&nibbles)[2], size_t chunk) {
    constexpr const ByteTable& kTable = kLevels<kFormat, KeyOperand<kFormat>::kBias>;
    __m512i operand[2];
    for (size_t i = 0; i < 2; ++i)
      operand[i] = Avx512::look_up(kTable, nibbles[i].template index<kNth>());
    sums.add(operand, q + chunk * kChunk, job.head_dim);
  }
  void multiply_signed_group(const __m512i (&low)[2], const __m512i (&signs)[2], size_t chunk) {
    const SignedNibbles nibbles[2] = {{low[0], signs[0]}, {low[1], signs[1]}};
    multiply_signed<0>(nibbles, chunk);
    multiply_signed<1>(nibbles, chunk + 1);
    multiply_signed<2>(nibbles, chunk + 2);
    multiply_signed<3>(nibbles, chunk + 3);
  }

  // Groups of the low plane whose high plane is not in whole groups.
  void multiply_odd_groups(size_t first, size_t last) {
    __m512i high[2];
    load(tables.high_at, high);
    if constexpr (kSigned) {
      if (tables.high_repeats) {  // these are the last 64 coordinates
        for (__m512i& bytes : high) bytes = spread_last_signs(bytes, tables.high[0]);
        __m512i low[2];
        load(first / kLowChunks * 16, low);
        return multiply_signed_group(low, high, first);
      }
    } else if (kHigh == 1 && tables.high_repeats) {
      for (__m512i& bytes : high)
        bytes = _mm512_shuffle_epi8(bytes, _mm512_load_si512(tables.high[0].byte));
      for (size_t chunk = first; chunk < last; chunk += kLowChunks)
        multiply_group<HighPlane::repeated, 0>(high, chunk);
      return;
    }
    for (size_t chunk = first; chunk < last; chunk += kLowChunks)
      multiply_group<HighPlane::placed, 0>(high, chunk);
  }

  // Whole groups of both planes, of which the high one's bytes are `high`.
  void multiply_whole(const __m512i (&high)[2], size_t chunk) {
#if !defined(__AVX512VBMI__)
    if constexpr (kSigned) {
      __m512i first[2], second[2];
      load_two(chunk / kLowChunks * 16, first, second);
      const __m512i early[2] = {spread_signs<false>(high[0]), spread_signs<false>(high[1])};
      multiply_signed_group(first, early, chunk);
      const __m512i late[2] = {spread_signs<true>(high[0]), spread_signs<true>(high[1])};
      return multiply_signed_group(second, late, chunk + kLowChunks);
    }
#endif
    if constexpr (kHighChunks == 2 * kLowChunks) {  // whose shifts are constants
      multiply_group<HighPlane::whole, 0>(high, chunk);
      multiply_group<HighPlane::whole, 1>(high, chunk + kLowChunks);
    } else {
      for (const size_t end = chunk + kHighChunks; chunk < end; chunk += kLowChunks)
        multiply_group<HighPlane::whole, 0>(high, chunk);
    }
  }

  // Chunks [first, last): a scale block. It has whole groups of a plane, or a part of its last one.
  void multiply(size_t first, size_t last) {
    __m512i high[2] = {};
    if ((last - first) % kLowChunks != 0 || (key_dim / kChunk) < last) {
      __m512i low[2];
      load(tables.low_at, low);
      if constexpr (kHigh != 0) load(tables.high_at, high);
      constexpr HighPlane kHighPlane = kHigh == 0 ? HighPlane::whole : HighPlane::placed;
      for (size_t chunk = first; chunk < last; ++chunk)
        multiply_chunk<false, kHighPlane, 0>(low, high, chunk);
    } else if ((last - first) % kHighChunks != 0) {
      if constexpr (kHigh != 0) multiply_odd_groups(first, last);
    } else {
      for (size_t chunk = first; chunk < last; chunk += kHighChunks) {
        if constexpr (kHigh != 0) load(high_plane() + chunk / kHighChunks * 16, high);
        multiply_whole(high, chunk);
      }
    }
  }
};

// Scores of a tile, [key][row], as rows.
template <size_t kRows>
inline void store_scores(const __m512 (&score)[2], float* to) {
  const __m512i keys = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  for (size_t r = 0; r < kRows; r += 2, to += 2 * kBlockKeys) {
    const __m512 two = _mm512_permutex2var_ps(
        score[0], _mm512_add_epi32(keys, _mm512_set1_epi32(static_cast<int>(r))), score[1]);
    _mm256_storeu_ps(to, _mm512_castps512_ps256(two));
    if (r + 1 < kRows) _mm256_storeu_ps(to + kBlockKeys, _mm512_extractf32x8_ps(two, 1));
  }
}

template <uint32_t kFormat, size_t kRows, bool kNear>
void score_rows(const ScoreJob& job, const QuadTables& tables, size_t row) {
  // The operands' bias adds that many times the sum of the query.
  __m512i bias[abi::kKvMaxScales];
  for (size_t b = 0; b < job.blocks->count; ++b) {
    alignas(16) int32_t sums[4] = {};
    for (size_t r = 0; r < kRows; ++r)
      sums[r] = KeyOperand<kFormat>::kBias * job.q_sums[(row + r) * abi::kKvMaxScales + b];
    bias[b] = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(sums)));
  }
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  for (size_t tile = 0; tile < job.key_count / kTile; ++tile) {
    if (row == 0) prefetch_steps(job.prefetch, tile * kTile, (tile + 1) * kTile);
    __m512 score[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (size_t b = 0; b < job.blocks->count; ++b) {
      TileProducts<kFormat, kRows, kNear> products{job,
                                                   tables,
                                                   tables.head_dim,
                                                   job.keys + tile * kTile * job.key_stride,
                                                   job.q + 2 * row * job.head_dim,
                                                   {}};
      const size_t first = job.blocks->begin[b] / kChunk;
      products.multiply(first, first + job.blocks->size[b] / kChunk);
      const __m512 scale = _mm512_castps256_ps512(
          tile_scales(job.scales + tile * job.scales_stride + b * kTile * 2));
      for (size_t i = 0; i < 2; ++i) {
        const __m512i sum = _mm512_slli_epi32(products.sums.by_key(i), KeyOperand<kFormat>::kShift);
        const __m512i of_key =
            _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i * kQuad)));
        score[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, bias[b])),
                                   _mm512_permutexvar_ps(of_key, scale), score[i]);
      }
    }
    store_scores<kRows>(score, job.scores + row * kBlockKeys + tile * kTile);
  }
}

}  // namespace
}  // namespace gyre::cpu
