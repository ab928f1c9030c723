// Many rows of queries with AMX's bf16 MMA. Nothing here may be instantiated elsewhere: the file is
// compiled with instructions other machines lack.
//
// The instruction flushes subnormal numbers. Blocks whose largest number is so small that parts of
// it would be lost, or so large that a product may overflow, or not finite, are refused.
#include "cpu/attention/isa/amx_split.h"
#include "isa/matrix.h"
#include "plan.h"

namespace gyre::ggml {
namespace {

using cpu::kDepth;
using cpu::kTileBytes;
using cpu::kTileSide;

constexpr size_t kPair = 2 * kTileSide;   // rows or columns that are multiplied at a time
constexpr size_t kStep = 2 * kTileBytes;  // hi and lo of a chunk of B
constexpr size_t kSlices = kBlockKeys / kMatrixSlice;
static_assert(kMatrixSlice == kPair && kMatrixSlice == kDepth && kTileRows % kPair == 0);

// What an operand holds: the largest magnitude, and whether there is any lo.
class Range {
 public:
  void add(__m512 x) {
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
    largest_ = _mm512_max_epu32(largest_, size);
  }
  void add(const cpu::Split& split) { lo_ = _mm512_or_si512(lo_, split.lo); }

  bool fits() const {
    constexpr uint32_t kSmall = (127 - 60) << 23, kLarge = (127 + 58) << 23;
    const auto largest = static_cast<uint32_t>(_mm512_reduce_max_epu32(largest_));
    return largest == 0 || (largest >= kSmall && largest < kLarge);
  }
  MatrixOperand operand() const {
    if (!fits()) return MatrixOperand::unfit;
    // -0 is a lo that adds nothing.
    const __m512i magnitude = _mm512_and_si512(lo_, _mm512_set1_epi32(0x7FFF7FFF));
    return _mm512_test_epi32_mask(magnitude, magnitude) == 0 ? MatrixOperand::hi
                                                             : MatrixOperand::hi_lo;
  }

 private:
  __m512i largest_ = _mm512_setzero_si512(), lo_ = _mm512_setzero_si512();
};

uint8_t* bytes_of(float* packed) { return reinterpret_cast<uint8_t*>(packed); }
const uint8_t* bytes_of(const float* packed) { return reinterpret_cast<const uint8_t*>(packed); }

size_t chunks_of(size_t dim) { return cpu::round_up(dim, kDepth) / kDepth; }

// 16 numbers of a row from c on, or zeros past its end.
__m512 load_row(const float* row, size_t c, size_t dim) {
  return row != nullptr && c < dim ? _mm512_load_ps(row + c) : _mm512_setzero_ps();
}

// 32 numbers of a row in pairs 16 apart, as A and B have them alike.
cpu::Split split_row(const float* row, size_t c, size_t dim, Range& range) {
  const __m512 a = load_row(row, c, dim), b = load_row(row, c + kTileSide, dim);
  range.add(a);
  range.add(b);
  return cpu::split_nearest(a, b);
}

void enter(TileShape& before) {
  // Without tiles the instruction stores zeros.
  __asm__ volatile("sttilecfg %0" : "=m"(before));
  cpu::configure_tiles();
}

void leave(const TileShape& before) {
  cpu::release_tiles();
  if (before.bytes[0] != 0) __asm__ volatile("ldtilecfg %0" : : "m"(before));
}

// A operands: of a row all hi, then all lo. Rows up to a multiple of 16 are there.
bool pack_queries(const float* q, uint32_t rows, uint32_t dim, float* to) {
  const size_t chunks = chunks_of(dim);
  Range range;
  uint8_t* at = bytes_of(to);
  for (size_t r = 0; r < cpu::round_up(rows, kTileSide); ++r, at += chunks * 128) {
    const float* const row = r < rows ? q + r * dim : nullptr;
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      const cpu::Split split = split_row(row, chunk * kDepth, dim, range);
      _mm512_store_si512(at + chunk * 64, split.hi);
      _mm512_store_si512(at + (chunks + chunk) * 64, split.lo);
    }
  }
  cpu::stores_are_done();
  return range.fits();
}

// B operands, [group of 16 cells][32 coordinates][hi, lo].
MatrixOperand pack_keys(const MatrixBlock& k, uint32_t slice, float* to) {
  Range range;
  const size_t chunks = chunks_of(k.dim);
  uint8_t* at = bytes_of(to) + slice * (kPair / kTileSide) * chunks * kStep;
  for (size_t key = 0; key < kPair; key += kTileSide) {
    for (size_t chunk = 0; chunk < chunks; ++chunk, at += kStep) {
      __m512i hi[kTileSide], lo[kTileSide];
      for (size_t i = 0; i < kTileSide; ++i) {
        const float* const row = key + i < k.keys ? k.values + (key + i) * k.stride : nullptr;
        const cpu::Split split = split_row(row, chunk * kDepth, k.dim, range);
        range.add(split);
        hi[i] = split.hi;
        lo[i] = split.lo;
      }
      cpu::store_tile(hi, at);
      cpu::store_tile(lo, at + kTileBytes);
    }
  }
  cpu::stores_are_done();
  return range.operand();
}

// B operands, [16 coordinates][32 cells][hi, lo]: a row has a pair of cells, 16 apart.
MatrixOperand pack_values(const MatrixBlock& v, uint32_t slice, float* to) {
  Range range;
  const auto row = [&](size_t key) { return key < v.keys ? v.values + key * v.stride : nullptr; };
  uint8_t* at = bytes_of(to) + slice * kStep;
  for (size_t c = 0; c < v.dim; c += kTileSide, at += kSlices * kStep) {
    for (size_t i = 0; i < kTileSide; ++i) {
      const __m512 a = load_row(row(i), c, v.dim);
      const __m512 b = load_row(row(i + kTileSide), c, v.dim);
      range.add(a);
      range.add(b);
      const cpu::Split split = cpu::split_nearest(a, b);
      range.add(split);
      _mm512_store_si512(at + i * 64, split.hi);
      _mm512_store_si512(at + i * 64 + kTileBytes, split.lo);
    }
  }
  cpu::stores_are_done();
  return range.operand();
}

// Tiles 0 to 3 become lo hi and hi hi and, if B has a lo, hi lo: in this order few tiles are loaded
// again.
void multiply(const cpu::SplitOperands& operands, MatrixOperand of_b) {
  cpu::zero_sums();
  for (size_t chunk = 0; chunk < operands.chunks; ++chunk) {
    const size_t a = chunk * 64, b = chunk * kStep;
    cpu::multiply_parts<true>(operands, a + operands.lo, b);
    cpu::multiply_parts<false>(operands, a, b);
    if (of_b == MatrixOperand::hi) continue;
    _tile_loadd(6, operands.b[0] + b + kTileBytes, 64);
    _tile_loadd(7, operands.b[1] + b + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

void score(const float* q, uint32_t rows, uint32_t dim, const float* k, MatrixOperand operand,
           uint32_t keys, float* logits) {
  const size_t chunks = chunks_of(dim), q_stride = chunks * 128, group = chunks * kStep;
  for (size_t key = 0; key < keys; key += kPair) {
    const uint8_t* const columns = bytes_of(k) + key / kTileSide * group;
    for (size_t row = 0; row < rows; row += kPair) {
      const uint8_t* const a = bytes_of(q) + row * q_stride;
      const bool two = row + kTileSide < rows;
      multiply({{a, two ? a + kTileSide * q_stride : a},
                q_stride,
                chunks * 64,
                {columns, columns + group},
                chunks},
               operand);
      float* const to = logits + row * kBlockKeys + key;
      _tile_stored(0, to, kBlockKeys * sizeof(float));
      _tile_stored(1, to + kTileSide, kBlockKeys * sizeof(float));
      if (!two) continue;
      _tile_stored(2, to + kTileSide * kBlockKeys, kBlockKeys * sizeof(float));
      _tile_stored(3, to + kTileSide * kBlockKeys + kTileSide, kBlockKeys * sizeof(float));
    }
  }
  cpu::stores_are_done();
}

// Weights as A operands: of a row 64 cells' hi, then lo, in pairs 16 apart.
struct Weights {
  static constexpr size_t kStride = 256, kLo = 128;
  alignas(64) uint8_t at[kTileRows * kStride];

  Weights(const float* p, uint32_t rows) {
    Range range;
    for (size_t r = 0; r < cpu::round_up(rows, kTileSide); ++r) {
      const float* const row = r < rows ? p + r * kBlockKeys : nullptr;
      for (size_t chunk = 0; chunk < kBlockKeys / kDepth; ++chunk) {
        const cpu::Split split = split_row(row, chunk * kDepth, kBlockKeys, range);
        _mm512_store_si512(at + r * kStride + chunk * 64, split.hi);
        _mm512_store_si512(at + r * kStride + kLo + chunk * 64, split.lo);
      }
    }
    cpu::stores_are_done();
  }
};

// acc = acc * rescale + sums for up to 16 rows and 16 coordinates.
void add_sums(const float (&sums)[kTileSide][kTileSide], const float* rescale, size_t rows,
              size_t dim, float* acc) {
  for (size_t r = 0; r < rows; ++r) {
    const __m512 sum = _mm512_load_ps(sums[r]), factor = _mm512_set1_ps(rescale[r]);
    _mm512_store_ps(acc + r * dim, _mm512_fmadd_ps(_mm512_load_ps(acc + r * dim), factor, sum));
  }
}

void accumulate(const float* p, const float* rescale, uint32_t rows, const float* v,
                MatrixOperand operand, uint32_t dim, float* acc) {
  constexpr size_t kGroup = kBlockKeys / kDepth * kStep;  // of 16 coordinates
  const Weights weights(p, rows);
  cpu::TileSums<float> sums[2];  // while one is read the other is written
  size_t next = 0;
  for (size_t row = 0; row < rows; row += kPair) {
    const size_t more = row + kTileSide < rows ? row + kTileSide : row;
    for (size_t c = 0; c < dim; c += kPair) {
      const uint8_t* const columns = bytes_of(v) + c / kTileSide * kGroup;
      const bool two = c + kTileSide < dim;
      multiply({{weights.at + row * Weights::kStride, weights.at + more * Weights::kStride},
                Weights::kStride,
                Weights::kLo,
                {columns, two ? columns + kGroup : columns},
                kBlockKeys / kDepth},
               operand);
      auto& out = sums[next ^= 1].at;
      _tile_stored(0, out[0], 64);
      _tile_stored(1, out[1], 64);
      _tile_stored(2, out[2], 64);
      _tile_stored(3, out[3], 64);
      cpu::stores_are_done();
      for (size_t i = 0; i < 4; ++i) {
        const size_t r = row + i / 2 * kTileSide, at = c + i % 2 * kTileSide;
        if (r >= rows || at >= dim) continue;
        const size_t count = rows - r < kTileSide ? rows - r : kTileSide;
        add_sums(out[i], rescale + r, count, dim, acc + r * dim + at);
      }
    }
  }
}

}  // namespace

MatrixKernels amx_matrix_kernels() {
  return {"AMX", enter, leave, pack_queries, pack_keys, pack_values, score, accumulate};
}

}  // namespace gyre::ggml
