#pragma once
// Rows of K as levels, 64 at a time, for files compiled with AVX-512: of rows in whole groups, and
// of all others. All of it anonymous, so that each file has its own copy.

#include <cstring>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/unpack_x86.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

// load<kBias>(row, chunk) gives the levels, plus kBias, of coordinates 64 chunk on.
template <uint32_t kFormat>
struct WholeKeys {
  size_t head_dim;
  explicit WholeKeys(const ScoreJob& job) : head_dim(job.head_dim) {}
  template <int32_t kBias>
  __m512i load(const uint8_t* row, size_t chunk) const {
    return unpack_k<Avx512, kFormat, kBias>(row, head_dim, chunk);
  }
};

// Where a chunk of 64 levels, a scale block or a part of one, has its bits in a plane: each 128
// bits of a vector take 16 bytes of the row, and of these a byte and bits of it for each level.
struct alignas(64) PlaneChunk {
  uint8_t byte[64], bit[64];  // the lowest bit, as a mask; both 0 where there is no level
  uint32_t at[4];
};

constexpr size_t kMaxChunks = kPaddedHeadDim / 64;

// The chunks of one plane of rows of head_dim coordinates that have row_bytes bytes.
template <uint32_t kBits>
void find_chunks(const ScaleBlocks& blocks, uint32_t head_dim, uint32_t plane, uint32_t row_bytes,
                 PlaneChunk* chunks) {
  constexpr uint32_t kGroup = abi::kv_group(kBits);
  const uint32_t grouped = head_dim / kGroup * kGroup, remainder = (head_dim - grouped) * kBits / 8;
  uint32_t coordinate = 0;
  for (uint32_t b = 0; b < blocks.count; ++b) {
    for (uint32_t i = 0; i < blocks.size[b]; ++i) {
      PlaneChunk& chunk = chunks[(blocks.begin[b] + i) / 64];
      const uint32_t lane = i % 64;
      if (lane == 0) std::memset(&chunk, 0, sizeof(chunk));
      if (i >= blocks.used[b]) continue;
      const bool last = coordinate >= grouped;
      const uint32_t nth = last ? coordinate - grouped : coordinate % kGroup;
      const uint32_t bytes = last ? remainder : 16;
      const uint32_t first = plane + (coordinate - nth) * kBits / 8;
      // 16 bytes that a row has.
      const uint32_t at = first + 16 <= row_bytes ? first : row_bytes - 16;
      chunk.at[lane / 16] = at;
      chunk.byte[lane] = static_cast<uint8_t>(first - at + nth % bytes);
      chunk.bit[lane] = static_cast<uint8_t>(1u << (nth / bytes * kBits));
      ++coordinate;
    }
  }
}

inline __m512i load_bytes(const uint8_t* row, const PlaneChunk& chunk) {
  const auto part = [&](size_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + chunk.at[i]));
  };
  __m512i bytes = _mm512_castsi128_si512(part(0));
  bytes = _mm512_inserti32x4(bytes, part(1), 1);
  bytes = _mm512_inserti32x4(bytes, part(2), 2);
  bytes = _mm512_inserti32x4(bytes, part(3), 3);
  return _mm512_shuffle_epi8(bytes, _mm512_load_si512(chunk.byte));
}

// Codes of a plane, in the lowest bits of bytes.
template <uint32_t kBits>
inline __m512i load_codes(const uint8_t* row, const PlaneChunk& chunk) {
  const __m512i bytes = load_bytes(row, chunk);
  if constexpr (kBits == 8) return bytes;
  __m512i bit = _mm512_load_si512(chunk.bit), codes = _mm512_setzero_si512();
  for (uint32_t i = 0; i < kBits; ++i) {
    const __mmask64 set = _mm512_test_epi8_mask(bytes, bit);
    codes = _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(static_cast<char>(1u << i)));
    bit = _mm512_add_epi8(bit, bit);
  }
  return codes;
}

// The chunks of both planes, for rows of one format and head dim.
struct OddTables {
  uint32_t format = 0, head_dim = 0;
  PlaneChunk low[kMaxChunks], high[kMaxChunks];
};

// A thread's last ones: a command has one format of K.
thread_local OddTables kept_tables;

template <uint32_t kFormat>
const OddTables& find_tables(const ScoreJob& job) {
  constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  OddTables& tables = kept_tables;
  if (tables.format == kFormat && tables.head_dim == job.key_dim) return tables;
  tables.format = kFormat;
  tables.head_dim = job.key_dim;
  const uint32_t plane = job.key_dim * kLow / 8, row_bytes = plane + job.key_dim * kHigh / 8;
  find_chunks<kLow>(*job.blocks, job.key_dim, 0, row_bytes, tables.low);
  if constexpr (kHigh != 0)
    find_chunks<kHigh>(*job.blocks, job.key_dim, plane, row_bytes, tables.high);
  return tables;
}

// Rows that are not in whole groups, and those whose scale blocks are no multiples of 64.
template <uint32_t kFormat>
struct OddKeys {
  static constexpr uint32_t kLow = abi::kv_low_bits(kFormat), kHigh = abi::kv_high_bits(kFormat);
  const OddTables& tables;
  explicit OddKeys(const ScoreJob& job) : tables(find_tables<kFormat>(job)) {}

  template <int32_t kBias>
  __m512i load(const uint8_t* row, size_t chunk) const {
    const __m512i low = load_codes<kLow>(row, tables.low[chunk]);
    if constexpr (kLow == 8) {
      return kBias == 0 ? low : _mm512_xor_si512(low, _mm512_set1_epi8(static_cast<char>(0x80)));
    } else if constexpr (kHigh == 0) {
      return Avx512::look_up(kLevels<kFormat, kBias>, low);
    } else {
      return join_planes<Avx512, kFormat, kBias>(low, load_codes<kHigh>(row, tables.high[chunk]));
    }
  }
};

// Calls run(keys) with the loader of the job's keys.
template <class Run>
inline void with_keys(const ScoreJob& job, const Run& run) {
  with_native_format(job.format, [&](auto format) {
    constexpr uint32_t kFormat = decltype(format)::value;
    if (job.key_dim == 0) return run(WholeKeys<kFormat>(job));
    run(OddKeys<kFormat>(job));
  });
}

}  // namespace
}  // namespace gyre::cpu
