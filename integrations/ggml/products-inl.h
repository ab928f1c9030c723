// Dot products and weighted sums over blocks of unpacked rows, in f32.

#if defined(GYRE_GGML_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_PRODUCTS_INL_H
#undef GYRE_GGML_PRODUCTS_INL_H
#else
#define GYRE_GGML_PRODUCTS_INL_H
#endif

#include <type_traits>

#include "unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {

// Lanes of 16 sums are added up: out[i] is the sum of v[i]'s lanes.
HWY_INLINE void SumLanes(const VW (&v)[16], float* HWY_RESTRICT out) {
  const DW d;
  const hn::Repartition<double, DW> pairs;
  const hn::CappedTag<float, 4> four;
  for (size_t i = 0; i < 16; i += 4) {
    const auto a =
        hn::Add(hn::InterleaveLower(d, v[i], v[i + 1]), hn::InterleaveUpper(d, v[i], v[i + 1]));
    const auto b = hn::Add(hn::InterleaveLower(d, v[i + 2], v[i + 3]),
                           hn::InterleaveUpper(d, v[i + 2], v[i + 3]));
    const auto x = hn::BitCast(pairs, a), y = hn::BitCast(pairs, b);
    // Each 128 bits hold a part of the four sums, in order.
    const auto sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, x, y)),
                              hn::BitCast(d, hn::InterleaveUpper(pairs, x, y)));
    alignas(64) float parts[16];
    hn::Store(sums, d, parts);
    auto sum = hn::Load(four, parts);
    for (size_t j = 4; j < hn::Lanes(d); j += 4) sum = hn::Add(sum, hn::Load(four, parts + j));
    hn::StoreU(sum, four, out + i);
  }
}

// Up to four rows of queries that are neither neighbours nor many.
struct RowSet {
  const float* q[kTileRows];
  float* acc[kTileRows];
  float* logits[kTileRows];  // kBlockKeys each
  uint32_t count = 0;
};

// A block of unpacked rows.
struct Block {
  const float* values;
  uint32_t keys, dim;
  size_t stride() const { return block_stride(dim); }
};

// kRows rows times 16 / kRows keys. Keys beyond the last are read again, not used.
template <uint32_t kRows>
HWY_INLINE void ScoreFew(const RowSet& rows, uint32_t row, const Block& k) {
  constexpr uint32_t kKeys = 16 / kRows;
  const DW d;
  for (uint32_t key = 0; key < k.keys; key += kKeys) {
    const float* at[kKeys];
    for (uint32_t i = 0; i < kKeys; ++i)
      at[i] = k.values + (key + i < k.keys ? key + i : key) * k.stride();
    VW sums[16];
    for (auto& sum : sums) sum = hn::Zero(d);
    for (size_t c = 0; c < k.dim; c += hn::Lanes(d)) {
      VW q[kRows];
      for (uint32_t r = 0; r < kRows; ++r) q[r] = hn::LoadU(d, rows.q[row + r] + c);
      for (uint32_t i = 0; i < kKeys; ++i) {
        const auto of_key = hn::LoadU(d, at[i] + c);
        for (uint32_t r = 0; r < kRows; ++r)
          sums[r * kKeys + i] = hn::MulAdd(q[r], of_key, sums[r * kKeys + i]);
      }
    }
    alignas(64) float scores[16];
    SumLanes(sums, scores);
    for (uint32_t r = 0; r < kRows; ++r)
      std::copy_n(scores + r * kKeys, kKeys, rows.logits[row + r] + key);
  }
}

// acc = acc * rescale + sum of p v over the block's keys: columns from c on, kVectors vectors.
template <uint32_t kRows, uint32_t kVectors>
HWY_INLINE void AccumulateFewColumns(const RowSet& rows, uint32_t row, const float* rescale,
                                     const Block& v, size_t c) {
  const DW d;
  VW sums[kRows][kVectors];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = hn::Zero(d);
  }
  const float* at = v.values + c;
  for (uint32_t key = 0; key < v.keys; ++key, at += v.stride()) {
    VW value[kVectors];
    for (uint32_t i = 0; i < kVectors; ++i) value[i] = hn::LoadU(d, at + i * hn::Lanes(d));
    for (uint32_t r = 0; r < kRows; ++r) {
      const auto p = hn::Set(d, rows.logits[row + r][key]);
      for (uint32_t i = 0; i < kVectors; ++i) sums[r][i] = hn::MulAdd(p, value[i], sums[r][i]);
    }
  }
  // The block is summed up before it is added: single keys would vanish beside a large sum.
  for (uint32_t r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, rescale[row + r]);
    for (uint32_t i = 0; i < kVectors; ++i) {
      float* const sum = rows.acc[row + r] + c + i * hn::Lanes(d);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, sum), factor, sums[r][i]), d, sum);
    }
  }
}

template <uint32_t kRows>
HWY_INLINE void AccumulateFew(const RowSet& rows, uint32_t row, const float* rescale,
                              const Block& v) {
  constexpr uint32_t kVectors = 4;
  const size_t step = kVectors * hn::Lanes(DW());
  size_t c = 0;
  for (; c + step <= v.dim; c += step)
    AccumulateFewColumns<kRows, kVectors>(rows, row, rescale, v, c);
  for (; c < v.dim; c += hn::Lanes(DW())) AccumulateFewColumns<kRows, 1>(rows, row, rescale, v, c);
}

// run(rows in the group, first row) for rows in fours, then twos, then one.
template <class Run>
HWY_INLINE void ForRowGroups(uint32_t rows, const Run& run) {
  uint32_t row = 0;
  for (; row + 4 <= rows; row += 4) run(std::integral_constant<uint32_t, 4>(), row);
  for (; row + 2 <= rows; row += 2) run(std::integral_constant<uint32_t, 2>(), row);
  if (row < rows) run(std::integral_constant<uint32_t, 1>(), row);
}

// Many rows: c[kMicro][kVectors] = sum over `depth` of a b, where a's factors are broadcast.
constexpr uint32_t kMicro = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 ? 4 : 8;

struct MicroProduct {
  const float* a;
  size_t a_step, a_depth;  // floats from factor to factor of a column, and to the next depth
  const float* b;
  size_t b_depth;
  uint32_t depth;
};

template <uint32_t kVectors>
HWY_INLINE void MultiplyStep(const MicroProduct& product, const float* a, const float* b,
                             VW (&c)[kMicro][kVectors]) {
  const DW d;
  VW of_b[kVectors];
  for (uint32_t j = 0; j < kVectors; ++j) of_b[j] = hn::LoadU(d, b + j * hn::Lanes(d));
  for (uint32_t m = 0; m < kMicro; ++m) {
    const auto factor = hn::Set(d, a[m * product.a_step]);
    for (uint32_t j = 0; j < kVectors; ++j) c[m][j] = hn::MulAdd(factor, of_b[j], c[m][j]);
  }
}

template <uint32_t kVectors>
HWY_INLINE void Multiply(const MicroProduct& product, VW (&c)[kMicro][kVectors]) {
  const DW d;
  for (auto& of_row : c) {
    for (auto& sum : of_row) sum = hn::Zero(d);
  }
  const float* a = product.a;
  const float* b = product.b;
  const size_t a_depth = product.a_depth, b_depth = product.b_depth;
  uint32_t i = 0;
  // Two steps a turn: counting costs as much as a step of loads.
  for (; i + 2 <= product.depth; i += 2, a += 2 * a_depth, b += 2 * b_depth) {
    MultiplyStep<kVectors>(product, a, b, c);
    MultiplyStep<kVectors>(product, a + a_depth, b + b_depth, c);
  }
  if (i < product.depth) MultiplyStep<kVectors>(product, a, b, c);
}

// logits[key][row] = k[key] q[..][row] for kVectors vectors of rows.
template <uint32_t kVectors>
HWY_INLINE void ScoreMany(const Block& k, const float* HWY_RESTRICT q_columns,
                          float* HWY_RESTRICT logits) {
  const DW d;
  for (uint32_t key = 0; key < k.keys; key += kMicro) {
    VW c[kMicro][kVectors];
    Multiply<kVectors>(
        {k.values + key * k.stride(), k.stride(), 1, q_columns, kColumnStride, k.dim}, c);
    for (uint32_t m = 0; m < kMicro; ++m) {
      for (uint32_t j = 0; j < kVectors; ++j)
        hn::StoreU(c[m][j], d, logits + (key + m) * kTileRows + j * hn::Lanes(d));
    }
  }
}

// acc[row][..] = acc * rescale + p[..][row] v, for kVectors vectors of columns from c on.
template <uint32_t kVectors>
HWY_INLINE void AccumulateMany(const float* HWY_RESTRICT p, const float* rescale, uint32_t rows,
                               const Block& v, uint32_t c, float* HWY_RESTRICT acc) {
  const DW d;
  for (uint32_t row = 0; row < rows; row += kMicro) {
    VW sums[kMicro][kVectors];
    Multiply<kVectors>({p + row, 1, kTileRows, v.values + c, v.stride(), v.keys}, sums);
    const uint32_t count = std::min(rows - row, kMicro);
    for (uint32_t m = 0; m < count; ++m) {
      const auto factor = hn::Set(d, rescale[row + m]);
      for (uint32_t j = 0; j < kVectors; ++j) {
        float* const at = acc + size_t{row + m} * v.dim + c + j * hn::Lanes(d);
        hn::StoreU(hn::MulAdd(hn::LoadU(d, at), factor, sums[m][j]), d, at);
      }
    }
  }
}

// Rows whose keys have other weights than 0 only, for values that are not finite.
HWY_INLINE void AccumulateSeen(const float* weights, size_t step, float rescale, const Block& v,
                               float* HWY_RESTRICT acc) {
  for (uint32_t c = 0; c < v.dim; ++c) acc[c] *= rescale;
  for (uint32_t key = 0; key < v.keys; ++key) {
    const float weight = weights[key * step];
    if (weight == 0) continue;
    for (uint32_t c = 0; c < v.dim; ++c) acc[c] += weight * v.values[key * v.stride() + c];
  }
}

HWY_INLINE bool IsFinite(const Block& v) {
  const DW d;
  auto sum = hn::Zero(d);  // x - x is 0 or NaN
  for (uint32_t key = 0; key < v.keys; ++key) {
    for (size_t c = 0; c < v.dim; c += hn::Lanes(d)) {
      const auto x = hn::LoadU(d, v.values + key * v.stride() + c);
      sum = hn::Add(sum, hn::Sub(x, x));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, sum)) == 0;
}

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
