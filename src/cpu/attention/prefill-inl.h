// Attention for many rows, which arithmetic bounds: each block of keys and values is unpacked to
// f32 once and multiplied with up to 64 rows, as matrix products. Rows run along the vectors:
// scores and probabilities lie as [key][row].

#if defined(GYRE_CPU_ATTENTION_PREFILL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ATTENTION_PREFILL_INL_H
#undef GYRE_CPU_ATTENTION_PREFILL_INL_H
#else
#define GYRE_CPU_ATTENTION_PREFILL_INL_H
#endif

#include <cmath>

#include "cpu/attention/problem-inl.h"
#include "cpu/attention/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

// Along rows of queries and, as far as they go, coordinates; head dims may end in eight lanes.
using DW = hn::CappedTag<float, 16>;

// One row's factor for a whole vector. On Arm a multiplication takes a lane of a register as it is.
template <int kLane, class D>
HWY_INLINE hn::Vec<D> LaneOf(D d, const float* a) {
#if HWY_ARCH_ARM
  return hn::Broadcast<kLane>(hn::LoadU(d, a));
#else
  return hn::Set(d, a[kLane]);
#endif
}

constexpr uint32_t kMicroRows = 4;
constexpr uint32_t kMicroVectors = HWY_ARCH_ARM ? 4 : 2;

// Step kStep of c[4][vectors] += a[4][4] b[4][vectors], with a row by row.
template <uint32_t kStep, class D>
HWY_INLINE void MultiplyStep(D d, const float* a, size_t a_stride, const float* b,
                             hn::Vec<D> (&c)[kMicroRows][kMicroVectors]) {
  hn::Vec<D> row[kMicroVectors];
  for (uint32_t j = 0; j < kMicroVectors; ++j) row[j] = hn::LoadU(d, b + j * hn::Lanes(d));
  const auto a0 = LaneOf<kStep>(d, a), a1 = LaneOf<kStep>(d, a + a_stride),
             a2 = LaneOf<kStep>(d, a + 2 * a_stride), a3 = LaneOf<kStep>(d, a + 3 * a_stride);
  for (uint32_t j = 0; j < kMicroVectors; ++j) {
    c[0][j] = hn::MulAdd(a0, row[j], c[0][j]);
    c[1][j] = hn::MulAdd(a1, row[j], c[1][j]);
    c[2][j] = hn::MulAdd(a2, row[j], c[2][j]);
    c[3][j] = hn::MulAdd(a3, row[j], c[3][j]);
  }
}

// One step of the sum, with a's four factors side by side.
template <class D>
HWY_INLINE void MultiplyColumn(D d, const float* a, const float* b,
                               hn::Vec<D> (&c)[kMicroRows][kMicroVectors]) {
  hn::Vec<D> row[kMicroVectors];
  for (uint32_t j = 0; j < kMicroVectors; ++j) row[j] = hn::LoadU(d, b + j * hn::Lanes(d));
  const auto a0 = LaneOf<0>(d, a), a1 = LaneOf<1>(d, a), a2 = LaneOf<2>(d, a), a3 = LaneOf<3>(d, a);
  for (uint32_t j = 0; j < kMicroVectors; ++j) {
    c[0][j] = hn::MulAdd(a0, row[j], c[0][j]);
    c[1][j] = hn::MulAdd(a1, row[j], c[1][j]);
    c[2][j] = hn::MulAdd(a2, row[j], c[2][j]);
    c[3][j] = hn::MulAdd(a3, row[j], c[3][j]);
  }
}

class Prefill {
 public:
  explicit Prefill(WorkTile& work) : work_(work) {
    transpose_queries(work_.scratch->q, work_.k_dim());
    if (work_.latent()) transpose_queries(work_.scratch->rotary_queries(), work_.rotary_dim());
    std::fill_n(rescale_, kWidth, 1.0f);
    std::fill_n(reference_, kWidth, 0.0f);
    for (uint32_t r = 0; r < kWidth; ++r) slope_[r] = r < work_.rows ? work_.slope[r] : 0;
  }

  bool run() {
    std::fill_n(work_.scratch->acc, size_t{kWidth} * work_.v_dim(), 0.0f);
    return work_.for_blocks([&](const KeyBlock& block) {
      float* const rows = work_.scratch->kv;
      unpack(work_.k, block, rows);
      score(block, rows, work_.scratch->q, work_.k_dim(), false);
      if (work_.latent()) add_rotary(block);
      make_logits(block);
      make_probabilities(block);
      if (!work_.latent()) unpack(work_.v, block, rows);  // a latent is there already
      // Not where all rows see all keys: which do depends on how a prompt was cut.
      if (all_finite(block)) {
        accumulate(block);
      } else {
        accumulate_by_row(block);
      }
    });
  }

  void read_row(uint32_t row, float* values) const {
    std::copy_n(work_.scratch->acc + size_t{row} * work_.v_dim(), work_.v_dim(), values);
  }

 private:
  static constexpr uint32_t kWidth = kTileRows;

  // Queries become [coordinate][row], rows padded with zeros.
  void transpose_queries(float* q, uint32_t n) const {
    float* const transposed = work_.scratch->kv;
    std::fill_n(transposed, size_t{n} * kWidth, 0.0f);
    for (uint32_t r = 0; r < work_.rows; ++r) {
      for (uint32_t c = 0; c < n; ++c) transposed[size_t{c} * kWidth + r] = q[size_t{r} * n + c];
    }
    std::copy_n(transposed, size_t{n} * kWidth, q);
  }

  // Lanes without a key count as zeros.
  static void unpack(const HeadView& cache, const KeyBlock& block, float* rows) {
    const uint32_t n = cache.layout->head_dim;
    UnpackBlock(cache, block, rows);
    std::fill_n(rows, size_t{block.begin} * n, 0.0f);
    std::fill(rows + size_t{block.end} * n, rows + size_t{block.lanes()} * n, 0.0f);
  }

  // Rows in use, in whole micro-tiles.
  uint32_t width() const {
    const auto step = static_cast<uint32_t>(kMicroVectors * hn::Lanes(DW()));
    return (work_.rows + step - 1) / step * step;
  }

  void add_rotary(const KeyBlock& block) const {
    float* const rows = work_.scratch->rotary_rows();
    unpack(work_.rotary, block, rows);
    score(block, rows, work_.scratch->rotary_queries(), work_.rotary_dim(), true);
  }

  // Dot products of keys and queries of n coordinates; `adds`: added to those that are there.
  void score(const KeyBlock& block, const float* keys, const float* q, uint32_t n,
             bool adds) const {
    const DW d;
    const auto step = static_cast<uint32_t>(kMicroVectors * hn::Lanes(d));
    for (uint32_t r = 0; r < width(); r += step) {
      for (uint32_t key = 0; key < block.lanes(); key += kMicroRows) {
        hn::Vec<DW> c[kMicroRows][kMicroVectors];
        float* const scores = work_.scratch->logits + size_t{key} * kWidth + r;
        for (uint32_t k = 0; k < kMicroRows; ++k) {
          for (uint32_t j = 0; j < kMicroVectors; ++j)
            c[k][j] =
                adds ? hn::LoadU(d, scores + size_t{k} * kWidth + j * hn::Lanes(d)) : hn::Zero(d);
        }
        const float* const a = keys + size_t{key} * n;
        const float* const b = q + r;
        for (uint32_t i = 0; i < n; i += 4) {
          MultiplyStep<0>(d, a + i, n, b + size_t{i} * kWidth, c);
          MultiplyStep<1>(d, a + i, n, b + size_t{i + 1} * kWidth, c);
          MultiplyStep<2>(d, a + i, n, b + size_t{i + 2} * kWidth, c);
          MultiplyStep<3>(d, a + i, n, b + size_t{i + 3} * kWidth, c);
        }
        for (uint32_t k = 0; k < kMicroRows; ++k) {
          for (uint32_t j = 0; j < kMicroVectors; ++j)
            hn::StoreU(c[k][j], d, scores + size_t{k} * kWidth + j * hn::Lanes(d));
        }
      }
    }
  }

  // Scale, cap, bias, mask.
  void make_logits(const KeyBlock& block) const {
    const DW d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    const float cap = work_.params->soft_cap;
    const auto caps = hn::Set(d, cap);
    const auto scale = hn::Set(d, work_.params->scale), to_base2 = hn::Set(d, kLog2E);
    const auto factor = hn::Mul(scale, to_base2);
    for (uint32_t key = 0; key < block.lanes(); ++key) {
      float* const logits = work_.scratch->logits + size_t{key} * kWidth;
      for (uint32_t r = 0; r < width(); r += lanes) {
        auto x = hn::Load(d, logits + r);
        if (work_.plain()) {
          x = hn::Mul(x, factor);
        } else {
          x = hn::Mul(x, scale);
          if (cap > 0) x = SoftCap(x, caps);
          alignas(64) float distance[16];
          for (uint32_t i = 0; i < lanes; ++i) {
            const uint32_t row = std::min(r + i, work_.rows - 1);
            distance[i] = static_cast<float>(block.key + key - work_.position[row]);
          }
          x = hn::Mul(hn::MulAdd(hn::Load(d, slope_ + r), hn::Load(d, distance), x), to_base2);
        }
        hn::Store(x, d, logits + r);
      }
    }
    for (uint32_t r = 0; r < work_.rows; ++r) mask_row(block, r);
  }

  void mask_row(const KeyBlock& block, uint32_t row) const {
    float* const logits = work_.scratch->logits + row;
    const Share seen = work_.seen(block, row);
    const uint64_t lanes = block.lanes();
    for (uint64_t key = 0; key < std::min(seen.begin, lanes); ++key)
      logits[key * kWidth] = kMinusInfinity;
    for (uint64_t key = std::min(seen.end, lanes); key < lanes; ++key)
      logits[key * kWidth] = kMinusInfinity;
    if (!work_.touches_tree(block)) return;
    for (uint64_t key = seen.begin; key < seen.end; ++key) {
      if (work_.tree_hides(block, row, key)) logits[key * kWidth] = kMinusInfinity;
    }
  }

  // Merges the block into every row's softmax state; logits become probabilities.
  void make_probabilities(const KeyBlock& block) {
    const DW d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    alignas(64) float largest[kWidth], sums[kWidth];
    for (uint32_t r = 0; r < width(); r += lanes) {
      const float* const logits = work_.scratch->logits + r;
      auto max = hn::Set(d, kMinusInfinity);
      for (uint32_t key = 0; key < block.lanes(); ++key)
        max = hn::Max(max, hn::Load(d, logits + size_t{key} * kWidth));
      hn::Store(max, d, largest + r);
    }
    for (uint32_t r = 0; r < work_.rows; ++r) {
      rescale_[r] = work_.state[r].raise(largest[r]);
      reference_[r] = work_.state[r].reference();
    }
    for (uint32_t r = 0; r < width(); r += lanes) {
      float* const logits = work_.scratch->logits + r;
      const auto reference = hn::Load(d, reference_ + r);
      auto sum = hn::Zero(d);
      for (uint32_t key = 0; key < block.lanes(); ++key) {
        float* const at = logits + size_t{key} * kWidth;
        const auto p = Exp2(hn::Sub(hn::Load(d, at), reference));
        hn::Store(p, d, at);
        sum = hn::Add(sum, p);
      }
      hn::Store(sum, d, sums + r);
    }
    for (uint32_t r = 0; r < work_.rows; ++r) work_.state[r].sum += sums[r];
  }

  bool all_finite(const KeyBlock& block) const {
    const DW d;
    const size_t count = size_t{block.lanes()} * work_.v_dim();
    auto sum = hn::Zero(d);  // x - x is 0 or NaN
    for (size_t i = 0; i < count; i += hn::Lanes(d)) {
      const auto x = hn::Load(d, work_.scratch->kv + i);
      sum = hn::Add(sum, hn::Sub(x, x));
    }
    return hn::GetLane(hn::SumOfLanes(d, sum)) == 0;
  }

  void accumulate(const KeyBlock& block) const {
    const auto lanes = static_cast<uint32_t>(hn::Lanes(DF()));
    uint32_t column = accumulate_columns(DW(), block, 0);
    column = accumulate_columns(DF(), block, column);
    for (; column < work_.v_dim(); column += lanes) {
      for (uint32_t row = 0; row < work_.rows; ++row) accumulate_one(block, row, column);
    }
  }

  // As many whole micro-tiles as there are from `column` on; returns the column after them.
  template <class D>
  uint32_t accumulate_columns(D d, const KeyBlock& block, uint32_t column) const {
    const size_t lanes = hn::Lanes(d);
    const uint32_t n = work_.v_dim(), step = static_cast<uint32_t>(kMicroVectors * lanes);
    for (; column + step <= n; column += step) {
      for (uint32_t row = 0; row < work_.rows; row += kMicroRows) {
        hn::Vec<D> c[kMicroRows][kMicroVectors];
        for (auto& of_row : c) {
          for (auto& v : of_row) v = hn::Zero(d);
        }
        const float* b = work_.scratch->kv + column;
        const float* a = work_.scratch->logits + row;
        for (uint32_t key = 0; key < block.lanes(); ++key, a += kWidth, b += n)
          MultiplyColumn(d, a, b, c);
        // The block is summed up before it is added: single keys would vanish beside a large sum.
        float* const place = work_.scratch->acc + size_t{row} * n + column;
        for (uint32_t i = 0; i < kMicroRows; ++i) {
          const auto rescale = hn::Set(d, rescale_[row + i]);
          for (uint32_t j = 0; j < kMicroVectors; ++j) {
            float* const at = place + size_t{i} * n + j * lanes;
            hn::StoreU(hn::MulAdd(hn::LoadU(d, at), rescale, c[i][j]), d, at);
          }
        }
      }
    }
    return column;
  }

  // A vector of columns of one row.
  void accumulate_one(const KeyBlock& block, uint32_t row, uint32_t column) const {
    const DF d;
    const uint32_t n = work_.v_dim();
    float* const place = work_.scratch->acc + size_t{row} * n + column;
    auto c = hn::Zero(d);
    for (uint32_t key = block.begin; key < block.end; ++key) {
      const float p = work_.scratch->logits[size_t{key} * kWidth + row];
      if (p == 0) continue;  // whatever the value is
      c = hn::MulAdd(hn::Set(d, p), hn::LoadU(d, work_.scratch->kv + size_t{key} * n + column), c);
    }
    hn::StoreU(hn::MulAdd(hn::LoadU(d, place), hn::Set(d, rescale_[row]), c), d, place);
  }

  // A value that some row does not see is not finite, and 0 times that is NaN: each row skips what
  // it does not see.
  void accumulate_by_row(const KeyBlock& block) const {
    const auto lanes = static_cast<uint32_t>(hn::Lanes(DF()));
    for (uint32_t row = 0; row < work_.rows; ++row) {
      for (uint32_t column = 0; column < work_.v_dim(); column += lanes)
        accumulate_one(block, row, column);
    }
  }

  WorkTile& work_;
  alignas(64) float rescale_[kWidth], reference_[kWidth], slope_[kWidth];
};

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
