// Decode attention's inner loops over levels with AMX's int8 MMA, for up to eight rows: hi and lo
// of a row are two columns of B (queries), or two rows of A (weights), so that K and V need no
// transposing. The integers, and what is made of them, are those of vnni.cpp, bit for bit. Nothing
// here may be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include "cpu/attention/isa/amx_few_rows.h"

#include <cstddef>
#include <cstring>

#include "cpu/attention/isa/amx_levels.h"
#include "cpu/attention/isa/row_keys_avx512.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

constexpr size_t kChunk = 64;  // coordinates that a tile holds of 16 keys
constexpr size_t kQuad = 4;    // rows of queries: hi of four and lo of four are eight columns of B

// Levels of the block's keys, [group of 16 keys][chunk][key][64 levels]. Eight keys are loaded
// before they are stored: a load that follows a store to the same place of another page waits.
template <class Keys>
void unpack_keys(const ScoreJob& job, const Keys& loader, uint8_t* to) {
  const size_t chunks = job.head_dim / kChunk, key_count = job.key_count, stride = job.key_stride;
  const Prefetch prefetch = job.prefetch;
  const uint8_t* keys = job.keys;
  for (size_t key = 0; key < key_count; key += kTile, keys += kTile * stride) {
    prefetch_steps(prefetch, key, key + kTile);
    uint8_t* const at = to + key / kTileSide * chunks * kTileBytes + key % kTileSide * kChunk;
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      __m512i levels[kTile];
#pragma GCC unroll 8
      for (size_t i = 0; i < kTile; ++i)
        levels[i] = loader.template load<0>(keys + i * stride, chunk);
      for (size_t i = 0; i < kTile; ++i)
        _mm512_store_si512(at + chunk * kTileBytes + i * kChunk, levels[i]);
    }
  }
  stores_are_done();
}

// Where the levels of a group of keys lie, and how far a chunk and a key are from the next.
struct KeyTiles {
  const uint8_t* at;
  size_t group_step, chunk_step, key_stride;
};

// Multiplies all keys with all queries over one scale block: sums of a key are a row.
void multiply_keys(const ScoreJob& job, const KeyTiles& keys, size_t block,
                   TileSums<int32_t>& sums) {
  const size_t first = job.blocks->begin[block] / kChunk;
  const size_t last = first + job.blocks->size[block] / kChunk;
  const auto* const q = reinterpret_cast<const uint8_t*>(job.q);
  // Groups that are not there are replaced by the first.
  const auto group = [&](size_t i) {
    return keys.at + (i * kTileSide < job.key_count ? i : 0) * keys.group_step;
  };
  const uint8_t *const g0 = group(0), *const g1 = group(1), *const g2 = group(2),
                       *const g3 = group(3);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (size_t chunk = first; chunk < last; ++chunk) {
    const size_t at = chunk * keys.chunk_step;
    _tile_loadd(7, q + chunk * kTileBytes, 64);
    _tile_loadd(4, g0 + at, keys.key_stride);
    _tile_loadd(5, g1 + at, keys.key_stride);
    _tile_dpbssd(0, 4, 7);
    _tile_loadd(6, g2 + at, keys.key_stride);
    _tile_dpbssd(1, 5, 7);
    _tile_loadd(4, g3 + at, keys.key_stride);
    _tile_dpbssd(2, 6, 7);
    _tile_dpbssd(3, 4, 7);
  }
  _tile_stored(0, sums.at[0], 64);
  _tile_stored(1, sums.at[1], 64);
  _tile_stored(2, sums.at[2], 64);
  _tile_stored(3, sums.at[3], 64);
}

// The eight sums of two keys beside each other.
inline __m512i two_keys(const int32_t* key) {
  const auto load = [](const int32_t* at) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(load(key)), load(key + kTileSide), 1);
}

// 256 hi + lo of four rows and 16 keys: out[row] has a lane for each key. `sums` is at the first
// key's hi of the first of these rows.
inline void join_rows(const int32_t* sums, __m512i (&out)[kQuad]) {
  const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i quad[4];  // [row][four keys]
  for (size_t i = 0; i < 4; ++i) {
    const __m512i two = two_keys(sums + 4 * i * kTileSide);
    const __m512i next_two = two_keys(sums + (4 * i + 2) * kTileSide);
    const __m512i hi = _mm512_shuffle_i32x4(two, next_two, 0x88);
    const __m512i lo = _mm512_shuffle_i32x4(two, next_two, 0xDD);
    const __m512i joined = _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo);
    quad[i] = _mm512_permutexvar_epi32(by_row, joined);
  }
  const __m512i even01 = _mm512_shuffle_i32x4(quad[0], quad[1], 0x88);
  const __m512i odd01 = _mm512_shuffle_i32x4(quad[0], quad[1], 0xDD);
  const __m512i even23 = _mm512_shuffle_i32x4(quad[2], quad[3], 0x88);
  const __m512i odd23 = _mm512_shuffle_i32x4(quad[2], quad[3], 0xDD);
  out[0] = _mm512_shuffle_i32x4(even01, even23, 0x88);
  out[2] = _mm512_shuffle_i32x4(even01, even23, 0xDD);
  out[1] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
  out[3] = _mm512_shuffle_i32x4(odd01, odd23, 0xDD);
}

void add_scores(const ScoreJob& job, const TileSums<int32_t>& sums, size_t quad, size_t block) {
  const size_t rows = job.rows - quad < kQuad ? job.rows - quad : kQuad;
  for (size_t key = 0; key < job.key_count; key += kTileSide) {
    __m512i exact[kQuad];
    join_rows(sums.at[key / kTileSide][0] + 2 * quad, exact);
    const __m512 scale =
        two_tile_scales(job.scales, job.scales_stride, key / kTile, job.key_count / kTile, block);
    for (size_t r = 0; r < rows; ++r) {
      float* const at = job.scores + (quad + r) * kBlockKeys + key;
      const __m512 old = block == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
      _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), scale, old));
    }
  }
}

// Sums of V over a scale block, 64 coordinates at a time: [16 coordinates][hi and lo of a row].
template <uint32_t kFormat>
void accumulate_block(const AccumulateJob& job, const Weights& weights, size_t begin, size_t end) {
  alignas(64) uint8_t packed[4][kTileBytes];
  TileSums<int32_t> sums;
  for (size_t c = begin; c < end; c += 4 * kTileSide) {
    const auto left = [&](size_t i) {
      return end - c > i * kTileSide ? end - c - i * kTileSide : 0;
    };
    for (size_t i = 0; i < 4 && left(i) != 0; ++i) {
      const size_t coordinates = left(i) < kTileSide ? left(i) : kTileSide;
      prefetch_steps(job.prefetch, c / 8 + 2 * i, c / 8 + 2 * i + coordinates / 8);
      pack_values<kFormat>(job, c + i * kTileSide, coordinates, packed[i]);
    }
    stores_are_done();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, packed[0], 64);
    _tile_loadd(6, packed[left(1) != 0 ? 1 : 0], 64);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(7, packed[left(2) != 0 ? 2 : 0], 64);
    _tile_dpbusd(1, 4, 6);
    _tile_loadd(5, packed[left(3) != 0 ? 3 : 0], 64);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbusd(3, 4, 5);
    _tile_stored(0, sums.at[0], 64);
    _tile_stored(1, sums.at[1], 64);
    _tile_stored(2, sums.at[2], 64);
    _tile_stored(3, sums.at[3], 64);
    for (size_t i = 0; i < 4 && left(i) != 0; ++i) {
      const auto mask = static_cast<__mmask16>(left(i) < kTileSide ? (1u << left(i)) - 1 : 0xFFFFu);
      for (size_t r = 0; r < job.rows; ++r)
        add_row(job, weights, sums.at[i][2 * r], sums.at[i][2 * r + 1], r, c + i * kTileSide, mask);
    }
  }
}

template <uint32_t kFormat>
void accumulate_format(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const BlockScales scales(job, block);
    store_weights(job, scales, weights);
    stores_are_done();
    _tile_loadd(4, weights.bytes, kBlockKeys);
    const size_t begin = job.blocks->begin[block];
    accumulate_block<kFormat>(job, weights, begin, begin + job.blocks->size[block]);
  }
}

}  // namespace

void amx_arrange_few_rows(int8_t* q, uint32_t rows, uint32_t row_levels) {
  alignas(64) int8_t stored[2 * kAmxFewRows * kPaddedHeadDim];
  std::memcpy(stored, q, size_t{2} * rows * row_levels);
  for (size_t c = 0; c < row_levels; c += kChunk, q += kTileBytes) {
    __m512i columns[kTileSide], tile[kTileSide];
    for (size_t i = 0; i < kTileSide; ++i) {
      const size_t row = i / (2 * kQuad) * kQuad + i % kQuad, plane = i / kQuad % 2;
      columns[i] = row < rows ? _mm512_loadu_si512(stored + (2 * row + plane) * row_levels + c)
                              : _mm512_setzero_si512();
    }
    transpose_lanes(columns, tile);
    for (size_t i = 0; i < kTileSide; ++i) _mm512_storeu_si512(q + 64 * i, tile[i]);
  }
}

void amx_score_few_rows(const ScoreJob& job) {
  auto* const levels = static_cast<uint8_t*>(job.scratch);
  const size_t chunks = job.head_dim / kChunk;
  KeyTiles keys{levels, chunks * kTileBytes, kTileBytes, kChunk};
  if (job.format == abi::kTq8 && job.key_dim == 0 && job.key_count % kTileSide == 0) {
    keys = {job.keys, kTileSide * job.key_stride, kChunk, job.key_stride};
    prefetch_steps(job.prefetch, 0, job.key_count);
  } else {
    with_keys(job, [&](const auto& loader) { unpack_keys(job, loader, levels); });
  }
  TileSums<int32_t> sums;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    multiply_keys(job, keys, block, sums);
    for (size_t quad = 0; quad < job.rows; quad += kQuad) add_scores(job, sums, quad, block);
  }
}

void amx_accumulate_few_rows(const AccumulateJob& job) {
  with_native_format(job.format,
                     [&](auto format) { accumulate_format<decltype(format)::value>(job); });
}

}  // namespace gyre::cpu
