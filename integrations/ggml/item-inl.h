// One work item: its rows of queries over its cells, block by block, with an online softmax.

#if defined(GYRE_GGML_ITEM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_ITEM_INL_H
#undef GYRE_GGML_ITEM_INL_H
#else
#define GYRE_GGML_ITEM_INL_H
#endif

#include <cmath>

#include "mask-inl.h"
#include "products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {
using cpu::HWY_NAMESPACE::Exp2;
using cpu::HWY_NAMESPACE::FoldLogits;
using cpu::HWY_NAMESPACE::SoftCap;
using cpu::HWY_NAMESPACE::SoftmaxState;

class ItemRun {
 public:
  ItemRun(const Problem& problem, const Item& item, float* scratch)
      : p_(problem),
        item_(item),
        rows_(static_cast<uint32_t>(item.row_end - item.row_begin)),
        dk_(static_cast<uint32_t>(padded(problem.k_dim))),
        dv_(static_cast<uint32_t>(padded(problem.v_dim))) {
    const uint64_t heads = item.head_end - item.head_begin;
    q_ = scratch;
    acc_ = q_ + heads * rows_ * dk_;
    q_columns_ = acc_ + heads * rows_ * dv_;
    block_ = q_columns_ + heads * dk_ * kTileRows;
    logits_ = block_ + uint64_t{kBlockKeys} * std::max(dk_, dv_);
    bias_ = logits_ + uint64_t{kTileRows} * kBlockKeys;
    states_ = new (bias_ + uint64_t{kTileRows} * kBlockKeys) SoftmaxState[heads * rows_];
    std::fill_n(acc_, heads * rows_ * dv_, 0.0f);
    for (uint64_t head = 0; head < heads; ++head) load_queries(head);
  }

  void run() {
    // Few rows: a block of K or V stays in the first-level cache.
    const uint32_t step = takes_many(rows_) ? kBlockKeys : kBlockKeys / 2;
    const uint64_t heads = item_.head_end - item_.head_begin;
    for (uint64_t key = item_.key_begin; key < item_.key_end; key += step) {
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(item_.key_end - key, step));
      for (uint64_t head = 0; head < heads; ++head) {
        if (head == 0 || p_.mask.heads > 1) find_views(key, count, head);
        if (seeing_ == 0) continue;
        const Place at{key, count, head};
        if (takes_many(seeing_)) {
          run_many(at);
        } else {
          run_few(at);
        }
      }
    }
  }

  // done(query head, token, state, values) for every row.
  template <class Done>
  void for_rows(const Done& done) {
    for (uint64_t head = 0; head < item_.head_end - item_.head_begin; ++head) {
      for (uint32_t r = 0; r < rows_; ++r)
        done(query_head(head, r), token(r), states_[head * rows_ + r], acc(head, r));
    }
  }

 private:
  struct Place {
    uint64_t key;    // first cell
    uint32_t count;  // cells
    uint64_t head;   // KV head, from the item's first
  };

  // Whether so many rows are worth a vector each along them.
  static bool takes_many(uint32_t rows) { return rows >= hn::Lanes(DW()); }

  uint64_t token(uint32_t r) const { return (item_.row_begin + r) / p_.group(); }
  uint64_t query_head(uint64_t head, uint32_t r) const {
    return (item_.head_begin + head) * p_.group() + (item_.row_begin + r) % p_.group();
  }
  float* acc(uint64_t head, uint32_t r) const { return acc_ + (head * rows_ + r) * dv_; }

  // Queries times the scale, so that logits come out in base 2, or, with a soft cap, in base e.
  void load_queries(uint64_t head) {
    const float scale = p_.soft_cap > 0 ? p_.scale : p_.scale * kLog2E;
    float* const q = q_ + head * rows_ * dk_;
    for (uint32_t r = 0; r < rows_; ++r) {
      const auto* const from =
          reinterpret_cast<const float*>(p_.q.row(token(r), query_head(head, r), item_.stream));
      float* const to = q + uint64_t{r} * dk_;
      for (uint32_t c = 0; c < p_.k_dim; ++c) to[c] = from[c] * scale;
      std::fill(to + p_.k_dim, to + dk_, 0.0f);
    }
    if (!takes_many(rows_)) return;
    float* const columns = q_columns_ + head * dk_ * kTileRows;
    for (uint32_t c = 0; c < dk_; ++c) {
      float* const column = columns + uint64_t{c} * kTileRows;
      for (uint32_t r = 0; r < rows_; ++r) column[r] = q[uint64_t{r} * dk_ + c];
      std::fill(column + rows_, column + kTileRows, 0.0f);
    }
  }

  const uint16_t* mask_row(uint64_t key, uint64_t head, uint32_t r) const {
    const uint8_t* const row =
        p_.mask.row(token(r), query_head(head, r) % p_.mask.heads, item_.stream % p_.mask.streams);
    return reinterpret_cast<const uint16_t*>(row) + key;
  }

  void find_views(uint64_t key, uint32_t count, uint64_t head) {
    seeing_ = 0;
    uniform_ = true;
    for (uint32_t r = 0; r < rows_; ++r) {
      if (p_.mask.data == nullptr) {
        view_[r] = View::everything;
      } else if (r > 0 && p_.mask.heads == 1 && token(r) == token(r - 1)) {
        view_[r] = view_[r - 1];
      } else {
        view_[r] = ViewOf(mask_row(key, head, r), count);
      }
      seeing_ += view_[r] != View::nothing;
      uniform_ = uniform_ && view_[r] == View::everything;
    }
  }

  // K or V of a block as f32 rows. The next block's rows are fetched meanwhile: those of the next
  // head lie beside these.
  void unpack(const Rows& rows, uint64_t values, const Place& at) const {
    const uint64_t stream = item_.stream / (p_.streams / rows.streams);
    RowRun run{};
    run.rows = rows.row(at.key, item_.head_begin + at.head, stream);
    run.stride = rows.strides[0];
    run.count = at.count;
    run.values = static_cast<uint32_t>(values);
    const bool last_head = item_.head_begin + at.head + 1 == item_.head_end;
    if (!last_head) run.next = run.rows + rows.strides[1];
    if (last_head && at.key + 2 * uint64_t{at.count} <= item_.key_end)
      run.next = rows.row(at.key + at.count, item_.head_begin, stream);
    UnpackRows(rows.type, run, block_);
  }

  void apply_soft_cap(float* logits, uint32_t count) const {
    const DW d;
    const auto cap = hn::Set(d, p_.soft_cap), to_base2 = hn::Set(d, kLog2E);
    for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d)))
      hn::Store(hn::Mul(SoftCap(hn::Load(d, logits + i), cap), to_base2), d, logits + i);
  }

  float slope(uint64_t head, uint32_t r) const {
    return kLog2E * SlopeOf(p_.max_bias, p_.heads, query_head(head, r));
  }

  void run_few(const Place& at) {
    RowSet rows;
    uint32_t which[kTileRows];
    for (uint32_t r = 0; r < rows_; ++r) {
      if (view_[r] == View::nothing) continue;
      which[rows.count] = r;
      rows.q[rows.count] = q_ + (at.head * rows_ + r) * dk_;
      rows.acc[rows.count] = acc(at.head, r);
      rows.logits[rows.count] = logits_ + uint64_t{rows.count} * kBlockKeys;
      ++rows.count;
    }
    unpack(p_.k, p_.k_dim, at);
    ForRowGroups(rows.count, [&](auto group, uint32_t row) {
      ScoreFew<decltype(group)::value>(rows, row, block_, at.count, dk_);
    });
    float rescale[kTileRows];
    for (uint32_t i = 0; i < rows.count; ++i) {
      const uint32_t r = which[i];
      float* const logits = rows.logits[i];
      if (p_.soft_cap > 0) apply_soft_cap(logits, at.count);
      if (view_[r] == View::some)
        AddMask(mask_row(at.key, at.head, r), at.count, slope(at.head, r), logits);
      const uint32_t whole = (at.count + 7) / 8 * 8;
      std::fill(logits + at.count, logits + whole, kMinusInfinity);
      rescale[i] = FoldLogits(logits, whole, 1.0f, states_[at.head * rows_ + r]);
    }
    unpack(p_.v, p_.v_dim, at);
    if (!uniform_ && !block_is_finite(at.count)) return accumulate_by_row(rows, rescale, at.count);
    ForRowGroups(rows.count, [&](auto group, uint32_t row) {
      AccumulateFew<decltype(group)::value>(rows, row, rescale, block_, at.count, dv_);
    });
  }

  bool block_is_finite(uint32_t count) const {
    const DW d;
    auto sum = hn::Zero(d);  // x - x is 0 or NaN
    for (size_t i = 0; i < size_t{count} * dv_; i += hn::Lanes(d)) {
      const auto x = hn::LoadU(d, block_ + i);
      sum = hn::Add(sum, hn::Sub(x, x));
    }
    return hn::GetLane(hn::SumOfLanes(d, sum)) == 0;
  }

  // A value that some row does not see is not finite, and 0 times that is NaN: each row leaves out
  // what it does not see.
  void accumulate_one(const float* weights, size_t step, uint32_t count, float rescale,
                      float* values) const {
    for (uint32_t c = 0; c < dv_; ++c) values[c] *= rescale;
    for (uint32_t key = 0; key < count; ++key) {
      const float weight = weights[key * step];
      if (weight == 0) continue;
      for (uint32_t c = 0; c < dv_; ++c) values[c] += weight * block_[uint64_t{key} * dv_ + c];
    }
  }
  void accumulate_by_row(const RowSet& rows, const float* rescale, uint32_t count) const {
    for (uint32_t i = 0; i < rows.count; ++i)
      accumulate_one(rows.logits[i], 1, count, rescale[i], rows.acc[i]);
  }

  void run_many(const Place& at) {
    unpack(p_.k, p_.k_dim, at);
    const float* const columns = q_columns_ + at.head * dk_ * kTileRows;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(DW()));
    uint32_t r = 0;
    for (; r + lanes < rows_; r += 2 * lanes)
      ScoreMany<2>(block_, at.count, dk_, columns + r, logits_ + r);
    if (r < rows_) ScoreMany<1>(block_, at.count, dk_, columns + r, logits_ + r);
    if (p_.soft_cap > 0) apply_soft_cap(logits_, at.count * kTileRows);
    if (!uniform_) add_masks(at);
    alignas(64) float rescale[kTileRows];
    fold_many(at, rescale);
    unpack(p_.v, p_.v_dim, at);
    if (!uniform_ && !block_is_finite(at.count)) {
      for (r = 0; r < rows_; ++r)
        accumulate_one(logits_ + r, kTileRows, at.count, rescale[r], acc(at.head, r));
      return;
    }
    uint32_t c = 0;
    for (; c + 2 * lanes <= dv_; c += 2 * lanes)
      AccumulateMany<2>(logits_, rescale, rows_, block_ + c, at.count, dv_, acc(at.head, 0) + c);
    for (; c < dv_; c += lanes)
      AccumulateMany<1>(logits_, rescale, rows_, block_ + c, at.count, dv_, acc(at.head, 0) + c);
  }

  // Logits lie as [cell][row]: a row's are gathered, masked and put back.
  void add_masks(const Place& at) const {
    for (uint32_t r = 0; r < rows_; ++r) {
      float* const column = logits_ + r;
      if (view_[r] == View::everything) continue;
      if (view_[r] == View::nothing) {
        for (uint32_t i = 0; i < at.count; ++i) column[i * kTileRows] = kMinusInfinity;
        continue;
      }
      for (uint32_t i = 0; i < at.count; ++i) bias_[i] = column[i * kTileRows];
      AddMask(mask_row(at.key, at.head, r), at.count, slope(at.head, r), bias_);
      for (uint32_t i = 0; i < at.count; ++i) column[i * kTileRows] = bias_[i];
    }
  }

  // FoldLogits for all rows side by side.
  void fold_many(const Place& at, float* rescale) {
    const DW d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    SoftmaxState* const states = states_ + at.head * rows_;
    alignas(64) float row[3][kTileRows];  // largest, reference, sum
    for (uint32_t r = 0; r < rows_; r += lanes) {
      auto largest = hn::Set(d, kMinusInfinity);
      for (uint32_t key = 0; key < at.count; ++key)
        largest = hn::Max(largest, hn::Load(d, logits_ + uint64_t{key} * kTileRows + r));
      hn::Store(largest, d, row[0] + r);
    }
    std::fill_n(row[1], kTileRows, 0.0f);
    for (uint32_t r = 0; r < rows_; ++r) {
      rescale[r] = states[r].raise(row[0][r]);
      row[1][r] = states[r].reference();
    }
    for (uint32_t r = 0; r < rows_; r += lanes) {
      const auto reference = hn::Load(d, row[1] + r);
      auto sum = hn::Zero(d);
      for (uint32_t key = 0; key < at.count; ++key) {
        float* const logit = logits_ + uint64_t{key} * kTileRows + r;
        const auto weight = Exp2(hn::Sub(hn::Load(d, logit), reference));
        hn::Store(weight, d, logit);
        sum = hn::Add(sum, weight);
      }
      hn::Store(sum, d, row[2] + r);
    }
    for (uint32_t r = 0; r < rows_; ++r) states[r].sum += row[2][r];
  }

  const Problem& p_;
  const Item& item_;
  const uint32_t rows_, dk_, dv_;
  float *q_, *acc_, *q_columns_, *block_, *logits_, *bias_;
  SoftmaxState* states_;
  View view_[kTileRows];
  uint32_t seeing_ = 0;   // rows that see something of the block
  bool uniform_ = false;  // every row sees every cell of it
};

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
