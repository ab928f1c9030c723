// Attention's inner loops over levels with AMX's int8 MMA, for many rows. The integers, and what is
// made of them, are those of vnni.cpp, bit for bit. Nothing here may be instantiated elsewhere: the
// file is compiled with instructions other machines lack.
#include <cstddef>

#include "cpu/attention/isa/amx_few_rows.h"
#include "cpu/attention/isa/amx_levels.h"
#include "cpu/attention/isa/row_keys_avx512.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

constexpr size_t kChunk = 64;  // coordinates that a tile holds of 16 keys

// Levels of the block's keys as B operands, [group of 16 keys][chunk]: a row has four coordinates
// of each key.
template <class Keys>
void pack_keys(const ScoreJob& job, const Keys& loader, uint8_t* to) {
  const size_t chunks = job.head_dim / kChunk;
  for (size_t group = 0; group * kTileSide < job.key_count; ++group) {
    prefetch_steps(job.prefetch, group * kTileSide, (group + 1) * kTileSide);
    for (size_t chunk = 0; chunk < chunks; ++chunk, to += kTileBytes) {
      __m512i levels[kTileSide], rows[kTileSide];
      for (size_t i = 0; i < kTileSide; ++i) {
        const size_t key = group * kTileSide + i;
        // A tile of 8 keys that is not there is replaced, not read.
        const uint8_t* const at =
            job.keys + (key < job.key_count ? key : key - kTile) * job.key_stride;
        levels[i] = loader.template load<0>(at, chunk);
      }
      transpose_lanes(levels, rows);
      for (size_t i = 0; i < kTileSide; ++i) _mm512_store_si512(to + i * 64, rows[i]);
    }
  }
  stores_are_done();
}

// Whether the rows from `row` on are so few that hi and lo of all fit into one tile: rows 2 i and
// 2 i + 1 of it, and of its sums.
inline bool one_tile(size_t rows, size_t row) { return rows - row <= kTileSide / 2; }

// Dot products of 16 queries with two groups of 16 keys over one scale block: hi and lo with the
// first group, hi and lo with the second. With one tile: with the first group, with the second.
void multiply_keys(const ScoreJob& job, const uint8_t* packed, size_t row, size_t group,
                   size_t block, TileSums<int32_t>& sums) {
  const size_t chunks = job.head_dim / kChunk, first = job.blocks->begin[block] / kChunk;
  const size_t last = first + job.blocks->size[block] / kChunk;
  const bool two = (group + 1) * kTileSide < job.key_count;
  const int8_t* const hi = job.q + 2 * row * job.head_dim;
  const int8_t* const lo = hi + job.head_dim;
  const size_t q_stride = size_t{2} * job.head_dim;
  const uint8_t* const keys = packed + group * chunks * kTileBytes;
  const uint8_t* const second_keys = two ? keys + chunks * kTileBytes : keys;
  _tile_zero(0);
  _tile_zero(1);
  if (one_tile(job.rows, row)) {
    for (size_t chunk = first; chunk < last; ++chunk) {
      _tile_loadd(4, hi + chunk * kChunk, job.head_dim);
      _tile_loadd(6, keys + chunk * kTileBytes, 64);
      _tile_loadd(7, second_keys + chunk * kTileBytes, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    for (size_t chunk = first; chunk < last; ++chunk) {
      _tile_loadd(4, hi + chunk * kChunk, q_stride);
      _tile_loadd(5, lo + chunk * kChunk, q_stride);
      _tile_loadd(6, keys + chunk * kTileBytes, 64);
      _tile_loadd(7, second_keys + chunk * kTileBytes, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(2, sums.at[2], 64);
    _tile_stored(3, sums.at[3], 64);
  }
  _tile_stored(0, sums.at[0], 64);
  _tile_stored(1, sums.at[1], 64);
}

// Adds one scale block's part to the scores of up to 16 rows and two groups of keys.
void add_scores(const ScoreJob& job, const TileSums<int32_t>& sums, size_t row, size_t group,
                size_t block) {
  const size_t rows = job.rows - row < kTileSide ? job.rows - row : kTileSide;
  const bool one = one_tile(job.rows, row);
  for (size_t half = 0; half < 2 && (group + half) * kTileSide < job.key_count; ++half) {
    const __m512 scale = two_tile_scales(job.scales, job.scales_stride, 2 * (group + half),
                                         job.key_count / kTile, block);
    const auto* const hi = one ? sums.at[half][0] : sums.at[2 * half][0];
    const size_t step = one ? 2 * kTileSide : kTileSide;
    const auto* const lo = one ? hi + kTileSide : sums.at[2 * half + 1][0];
    float* const at = job.scores + row * kBlockKeys + (group + half) * kTileSide;
    for (size_t r = 0; r < rows; ++r) {
      const __m512 old = block == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(at + r * kBlockKeys);
      const __m512i sum = join_hi_lo(hi + r * step, lo + r * step);
      _mm512_storeu_ps(at + r * kBlockKeys, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, old));
    }
  }
}

// Which kernels take this many rows of a work tile. Up to four the dot product is faster.
constexpr uint32_t kDotRows = 4;
bool takes_dot(uint32_t rows) { return rows <= kDotRows; }
bool takes_few(uint32_t rows) { return !takes_dot(rows) && rows <= kAmxFewRows; }

const AttentionKernels& dot() {
  static const AttentionKernels kKernels = vbmi_attention_kernels();
  return kKernels;
}

void arrange_queries(int8_t* q, uint32_t rows, uint32_t row_levels) {
  if (takes_few(rows)) amx_arrange_few_rows(q, rows, row_levels);
}

void score_levels(const ScoreJob& job) {
  if (takes_dot(job.tile_rows)) return dot().score_levels(job);
  if (takes_few(job.tile_rows)) return amx_score_few_rows(job);
  auto* const packed = static_cast<uint8_t*>(job.scratch);
  if (job.fresh) with_keys(job, [&](const auto& loader) { pack_keys(job, loader, packed); });
  TileSums<int32_t> sums;
  for (size_t group = 0; group * kTileSide < job.key_count; group += 2) {
    for (size_t row = 0; row < job.rows; row += kTileSide) {
      for (size_t block = 0; block < job.blocks->count; ++block) {
        multiply_keys(job, packed, row, group, block, sums);
        add_scores(job, sums, row, group, block);
      }
    }
  }
}

// acc = acc * rescale + sums (as add_row has it), for up to 16 rows and 16 or 32 coordinates. What
// stands in memory is read once: stores to acc could change it as far as the compiler knows.
template <size_t kColumns>
inline void add_rows(const AccumulateJob& job, const Weights& weights,
                     const TileSums<int32_t>& sums, size_t row, size_t c, __mmask16 last) {
  const size_t rows = job.rows - row < kTileSide ? job.rows - row : kTileSide;
  const size_t head_dim = job.head_dim;
  float* place = job.acc + row * head_dim + c;
  const float *const rescale = job.rescale + row, *const step = weights.step + row;
  for (size_t r = 0; r < rows; ++r, place += head_dim) {
    const __m512 of_old = _mm512_set1_ps(rescale[r]), of_sum = _mm512_set1_ps(step[r]);
#pragma GCC unroll 2
    for (size_t i = 0; i < kColumns; ++i) {
      const __mmask16 mask = i + 1 == kColumns ? last : __mmask16{0xFFFF};
      const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, place + i * kTileSide), of_old);
      const __m512i whole = join_hi_lo(sums.at[2 * i][r], sums.at[2 * i + 1][r]);
      const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(0x1p-8f));
      _mm512_mask_storeu_ps(place + i * kTileSide, mask, _mm512_fmadd_ps(sum, of_sum, old));
    }
  }
}

// Calls run(c, coordinates) for the scale block's coordinates, 16 at a time.
template <class Run>
inline void for_coordinates(const ScaleBlocks& blocks, size_t block, const Run& run) {
  const size_t end = blocks.begin[block] + blocks.size[block];
  for (size_t c = blocks.begin[block]; c < end; c += kTileSide)
    run(c, end - c < kTileSide ? end - c : kTileSide);
}

// All rows and up to 32 coordinates from c on, of which `coordinates` are there.
void accumulate_chunk(const AccumulateJob& job, const Weights& weights, const uint8_t* packed,
                      size_t c, size_t coordinates) {
  TileSums<int32_t> sums;
  const bool two = coordinates > kTileSide;
  const auto mask = [](size_t lanes) {
    return static_cast<__mmask16>(lanes < kTileSide ? (1u << lanes) - 1 : 0xFFFFu);
  };
  _tile_loadd(6, packed, 64);
  _tile_loadd(7, two ? packed + kTileBytes : packed, 64);
  for (size_t row = 0; row < job.rows; row += kTileSide) {
    _tile_zero(0);
    _tile_zero(1);
    if (one_tile(job.rows, row)) {
      _tile_loadd(4, weights.bytes[row][0], kBlockKeys);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_stored(0, sums.at[0], 64);
      _tile_stored(1, sums.at[1], 64);
      for (size_t r = 0; row + r < job.rows; ++r) {
        const auto add = [&](size_t i, size_t at, size_t lanes) {
          add_row(job, weights, sums.at[i][2 * r], sums.at[i][2 * r + 1], row + r, at, mask(lanes));
        };
        add(0, c, coordinates);
        if (two) add(1, c + kTileSide, coordinates - kTileSide);
      }
      return;
    }
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, weights.bytes[row][0], 2 * kBlockKeys);
    _tile_loadd(5, weights.bytes[row][1], 2 * kBlockKeys);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 5, 6);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbusd(3, 5, 7);
    _tile_stored(0, sums.at[0], 64);
    _tile_stored(1, sums.at[1], 64);
    _tile_stored(2, sums.at[2], 64);
    _tile_stored(3, sums.at[3], 64);
    if (two) {
      add_rows<2>(job, weights, sums, row, c, mask(coordinates - kTileSide));
    } else {
      add_rows<1>(job, weights, sums, row, c, mask(coordinates));
    }
  }
}

// All of V as B operands, 16 coordinates to a tile.
template <uint32_t kFormat>
void pack_all_values(const AccumulateJob& job, uint8_t* to) {
  for (size_t block = 0; block < job.blocks->count; ++block) {
    for_coordinates(*job.blocks, block, [&](size_t c, size_t coordinates) {
      prefetch_steps(job.prefetch, c / 8, c / 8 + coordinates / 8);
      pack_values<kFormat>(job, c, coordinates, to);
      to += kTileBytes;
    });
  }
  stores_are_done();
}

void accumulate_many_rows(const AccumulateJob& job) {
  auto* packed = static_cast<uint8_t*>(job.scratch);
  if (job.fresh)
    with_native_format(job.format,
                       [&](auto format) { pack_all_values<decltype(format)::value>(job, packed); });
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const BlockScales scales(job, block);
    store_weights(job, scales, weights);
    stores_are_done();
    const size_t begin = job.blocks->begin[block], end = begin + job.blocks->size[block];
    for (size_t c = begin; c < end; c += 2 * kTileSide) {
      accumulate_chunk(job, weights, packed, c, end - c);
      packed += (end - c > kTileSide ? 2 : 1) * kTileBytes;
    }
  }
}

void accumulate_levels(const AccumulateJob& job) {
  if (takes_dot(job.rows)) return dot().accumulate_levels(job);
  if (takes_few(job.rows)) return amx_accumulate_few_rows(job);
  accumulate_many_rows(job);
}

}  // namespace

AttentionKernels amx_attention_kernels() {
  AttentionKernels kernels;
  kernels.name = "amx";
  kernels.query_layout = QueryLayout::hi_then_lo;
  kernels.enter = configure_tiles;
  kernels.leave = release_tiles;
  kernels.arrange_queries = arrange_queries;
  kernels.dot_rows = kDotRows;
  kernels.prompt_rows = kMaxRows;
  kernels.odd_keys = true;
  kernels.score_levels = score_levels;
  kernels.accumulate_levels = accumulate_levels;
  return kernels;
}

}  // namespace gyre::cpu
