// Latent attention's inner loops over levels with AVX-512's dot product of unsigned with signed
// bytes. A block of the latent is packed once for both products and all rows: keys along the
// vectors for the scores, coordinates for the weighted sum, so that neither adds up lanes. Nothing
// here may be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include <cstddef>

#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/isa/row_keys_avx512.h"
#include "cpu/attention/isa/vnni_products.h"
#include "cpu/attention/isa/weights_avx512.h"
#include "cpu/kernels/native_format.h"

namespace gyre::cpu {
namespace {

constexpr int kBiasBits = 7, kBias = 1 << kBiasBits;  // levels of the scores are unsigned bytes
constexpr size_t kKeyVectors = kBlockKeys / 16;

inline __m512i set_word(const void* bytes) {
  int32_t word = 0;
  __builtin_memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// Lane by lane of 128 bits: v[i] becomes lane i of all four.
inline void transpose_lanes(__m512i (&v)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88),
                b = _mm512_shuffle_i32x4(v[0], v[1], 0xDD);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x88),
                d = _mm512_shuffle_i32x4(v[2], v[3], 0xDD);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[2] = _mm512_shuffle_i32x4(a, c, 0xDD);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

// 64 coordinates of 16 keys as [coordinate / 4][key][4].
inline void pack_keys(const __m512i (&row)[16], uint8_t* to) {
  __m512i quad[4][4];  // [key / 4][word % 4]: words of four keys side by side in each lane
  for (size_t i = 0; i < 4; ++i) {
    const __m512i *r = row + 4 * i, a = _mm512_unpacklo_epi32(r[0], r[1]),
                  b = _mm512_unpackhi_epi32(r[0], r[1]), c = _mm512_unpacklo_epi32(r[2], r[3]),
                  d = _mm512_unpackhi_epi32(r[2], r[3]);
    quad[i][0] = _mm512_unpacklo_epi64(a, c);
    quad[i][1] = _mm512_unpackhi_epi64(a, c);
    quad[i][2] = _mm512_unpacklo_epi64(b, d);
    quad[i][3] = _mm512_unpackhi_epi64(b, d);
  }
  for (size_t word = 0; word < 4; ++word) {
    __m512i v[4] = {quad[0][word], quad[1][word], quad[2][word], quad[3][word]};
    transpose_lanes(v);
    for (size_t lane = 0; lane < 4; ++lane)
      _mm512_store_si512(to + (4 * lane + word) * 4 * kBlockKeys, v[lane]);
  }
}

// Values lie in panels of 32 coordinates, which all rows multiply before the next one.
constexpr size_t kPanel = 32, kPanelBytes = kPanel * kBlockKeys;

// 64 coordinates of 4 keys as [coordinate][key], in two panels.
inline void pack_values(const __m512i* row, uint8_t* to) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const auto level = [&](size_t key) { return _mm512_xor_si512(row[key], sign); };
  const __m512i a = _mm512_unpacklo_epi8(level(0), level(1)),
                b = _mm512_unpackhi_epi8(level(0), level(1)),
                c = _mm512_unpacklo_epi8(level(2), level(3)),
                d = _mm512_unpackhi_epi8(level(2), level(3));
  __m512i v[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                  _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
  transpose_lanes(v);
  for (size_t i = 0; i < 4; ++i) _mm512_store_si512(to + i / 2 * kPanelBytes + i % 2 * 64, v[i]);
}

void pack_latent(const LatentBlock& block) {
  uint8_t* const values = block.packed + size_t{kBlockKeys} * block.head_dim;
  with_native_format(block.format, [&](auto format) {
    for (size_t first = 0; first < kBlockKeys; first += 16) {
      for (size_t chunk = 0; chunk < block.head_dim / 64; ++chunk) {
        __m512i row[16];
        for (size_t i = 0; i < 16; ++i) {
          row[i] = first + i < block.key_count
                       ? unpack_k<Avx512, decltype(format)::value, kBias>(
                             block.keys + (first + i) * block.key_stride, block.head_dim, chunk)
                       : _mm512_setzero_si512();
        }
        pack_keys(row, block.packed + (chunk * 16 * kBlockKeys + first) * 4);
        for (size_t i = 0; i < 16; i += 4)
          pack_values(row + i, values + chunk * 2 * kPanelBytes + (first + i) * kPanel);
      }
    }
  });
}

// Scales of one scale block, key by key; of keys that are not there 0.
struct KeyScales {
  __m512 of[kKeyVectors];
  KeyScales(const ScoreJob& job, size_t block) {
    const size_t tiles = job.key_count / kTile;
    for (size_t i = 0; i < kKeyVectors; ++i)
      of[i] = 2 * i < tiles ? two_tile_scales(job.scales, job.scales_stride, 2 * i, tiles, block)
                            : _mm512_setzero_ps();
  }
};

// Adds the scores of kRows rows with a scale block of the keys to those before it.
template <size_t kRows>
inline void score_rows(const ScoreJob& job, const KeyScales& scales, size_t row, size_t block) {
  __m512i hi[kRows][kKeyVectors], lo[kRows][kKeyVectors];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kKeyVectors; ++i) hi[r][i] = lo[r][i] = _mm512_setzero_si512();
  }
  const size_t begin = job.blocks->begin[block], end = begin + job.blocks->size[block];
  const auto* keys = static_cast<const uint8_t*>(job.scratch) + begin * kBlockKeys;
  const int8_t* const q = job.q + 2 * row * job.head_dim;
  for (size_t c = begin; c < end; c += 4, keys += 4 * kBlockKeys) {
    __m512i levels[kKeyVectors];
    for (size_t i = 0; i < kKeyVectors; ++i) levels[i] = _mm512_load_si512(keys + 64 * i);
    for (size_t r = 0; r < kRows; ++r) {
      const int8_t* const query = q + 2 * r * job.head_dim + c;
      const __m512i of_hi = set_word(query), of_lo = set_word(query + job.head_dim);
      for (size_t i = 0; i < kKeyVectors; ++i) {
        add_products(hi[r][i], levels[i], of_hi);
        add_products(lo[r][i], levels[i], of_lo);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    // The levels' bias adds that many times the sum of the query.
    const int32_t query_sum = job.q_sums[(row + r) * abi::kKvMaxScales + block];
    const __m512i bias = _mm512_slli_epi32(_mm512_set1_epi32(query_sum), kBiasBits);
    float* const scores = job.scores + (row + r) * kBlockKeys;
    for (size_t i = 0; i < kKeyVectors; ++i) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(hi[r][i], 8), lo[r][i]);
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, bias));
      const __m512 before = block == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(scores + 16 * i);
      _mm512_storeu_ps(scores + 16 * i, _mm512_fmadd_ps(exact, scales.of[i], before));
    }
  }
}

void score_latent(const ScoreJob& job) {
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const KeyScales scales(job, block);
    size_t row = 0;
    for (; row + 2 <= job.rows; row += 2) score_rows<2>(job, scales, row, block);
    if (row < job.rows) score_rows<1>(job, scales, row, block);
  }
}

// acc = acc * rescale + sums, for kRows rows and a panel of coordinates.
template <size_t kRows>
inline void accumulate_chunk(const AccumulateJob& job, const Weights& weights, size_t row,
                             size_t c) {
  constexpr size_t kChunks = kPanel / 16;
  __m512i acc[kRows][2][kChunks];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kChunks; ++i) acc[r][0][i] = acc[r][1][i] = _mm512_setzero_si512();
  }
  const uint8_t* values = job.values + c / kPanel * kPanelBytes;
  for (size_t key = 0; key < job.tiles * kTile; key += 4, values += 4 * kPanel) {
    __m512i v[kChunks];
    for (size_t i = 0; i < kChunks; ++i) v[i] = _mm512_load_si512(values + 64 * i);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t plane = 0; plane < 2; ++plane) {
        const __m512i p = set_word(weights.bytes[row + r][plane] + key);
        for (size_t i = 0; i < kChunks; ++i) add_products(acc[r][plane][i], p, v[i]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    float* const place = job.acc + (row + r) * job.head_dim + c;
    const __m512 rescale = _mm512_set1_ps(job.rescale[row + r]);
    // The step is worth 256: eight bits are behind the point.
    const __m512 step = _mm512_set1_ps(weights.step[row + r] * 0x1p-8f);
    for (size_t i = 0; i < kChunks; ++i) {
      const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]);
      const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(place + 16 * i), rescale);
      _mm512_storeu_ps(place + 16 * i, _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), step, old));
    }
  }
}

void accumulate_latent(const AccumulateJob& job) {
  Weights weights;
  for (size_t block = 0; block < job.blocks->count; ++block) {
    const BlockScales scales(job, block);
    store_weights(job, scales, weights);
    const size_t begin = job.blocks->begin[block], end = begin + job.blocks->size[block];
    for (size_t c = begin; c < end; c += kPanel) {
      for_row_groups(job.rows, [&](auto rows, size_t row) {
        accumulate_chunk<decltype(rows)::value>(job, weights, row, c);
      });
    }
  }
}

}  // namespace

void add_latent_kernels(AttentionKernels& kernels) {
  kernels.pack_latent = pack_latent;
  kernels.score_latent = score_latent;
  kernels.accumulate_latent = accumulate_latent;
}

}  // namespace gyre::cpu
