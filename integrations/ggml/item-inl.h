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
    k_block_ = q_columns_ + heads * tiles() * dk_ * kColumnStride;
    v_block_ = k_block_ + kBlockKeys * block_stride(dk_);
    logits_ = v_block_ + kBlockKeys * block_stride(dv_);
    row_ = logits_ + uint64_t{kTileRows} * kBlockKeys;
    states_ = new (row_ + kBlockKeys) SoftmaxState[heads * rows_];
    std::fill_n(acc_, heads * rows_ * dv_, 0.0f);
    for (uint64_t head = 0; head < heads; ++head) {
      load_queries(head);
      if (takes_many(rows_)) transpose_queries(head);
    }
  }

  void run() {
    // Few rows: a block of K or V stays in the first-level cache.
    const uint32_t step = takes_many(rows_) ? kBlockKeys : kBlockKeys / 2;
    const uint64_t heads = item_.head_end - item_.head_begin;
    for (uint64_t key = item_.key_begin; key < item_.key_end; key += step) {
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(item_.key_end - key, step));
      bool is_seen = false;
      for (uint64_t head = 0; head < heads; ++head) {
        if (head == 0 || p_.mask.heads > 1) is_seen = find_views(key, count, head);
        if (is_seen) run_block({key, count, head});
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
  // A block of cells of one KV head.
  struct Place {
    uint64_t key;    // first cell
    uint32_t count;  // cells
    uint64_t head;   // KV head, from the item's first
  };

  // Up to kTileRows rows, and what they see of the block.
  struct Tile {
    uint32_t first, rows;
    uint32_t seeing = 0;  // rows that see something
    bool uniform = true;  // every row sees every cell
  };

  // Whether so many rows are worth a vector each along them.
  static bool takes_many(uint32_t rows) { return rows >= hn::Lanes(DW()); }

  uint32_t tiles() const { return (rows_ + kTileRows - 1) / kTileRows; }
  uint64_t token(uint32_t r) const { return (item_.row_begin + r) / p_.group(); }
  uint64_t query_head(uint64_t head, uint32_t r) const {
    return (item_.head_begin + head) * p_.group() + (item_.row_begin + r) % p_.group();
  }
  float* acc(uint64_t head, uint32_t r) const { return acc_ + (head * rows_ + r) * dv_; }
  float* columns(uint64_t head, uint32_t first) const {
    return q_columns_ + (head * tiles() + first / kTileRows) * dk_ * kColumnStride;
  }

  // Queries times the scale, so that logits come out in base 2, or, with a soft cap, in base e.
  void load_queries(uint64_t head) {
    const float scale = p_.soft_cap > 0 ? p_.scale : p_.scale * kLog2E;
    for (uint32_t r = 0; r < rows_; ++r) {
      const auto* const from =
          reinterpret_cast<const float*>(p_.q.row(token(r), query_head(head, r), item_.stream));
      float* const to = q_ + (head * rows_ + r) * dk_;
      for (uint32_t c = 0; c < p_.k_dim; ++c) to[c] = from[c] * scale;
      std::fill(to + p_.k_dim, to + dk_, 0.0f);
    }
  }

  void transpose_queries(uint64_t head) {
    for (uint32_t first = 0; first < rows_; first += kTileRows) {
      const uint32_t rows = std::min(rows_ - first, kTileRows);
      const float* const q = q_ + (head * rows_ + first) * dk_;
      float* column = columns(head, first);
      for (uint32_t c = 0; c < dk_; ++c, column += kColumnStride) {
        for (uint32_t r = 0; r < rows; ++r) column[r] = q[uint64_t{r} * dk_ + c];
        std::fill(column + rows, column + kTileRows, 0.0f);
      }
    }
  }

  const uint16_t* mask_row(uint64_t key, uint64_t head, uint32_t r) const {
    const uint8_t* const row =
        p_.mask.row(token(r), query_head(head, r) % p_.mask.heads, item_.stream % p_.mask.streams);
    return reinterpret_cast<const uint16_t*>(row) + key;
  }

  // False if no row sees a cell of the block.
  bool find_views(uint64_t key, uint32_t count, uint64_t head) {
    bool is_seen = false;
    for (uint32_t r = 0; r < rows_; ++r) {
      if (p_.mask.data == nullptr) {
        view_[r] = View::everything;
      } else if (r > 0 && p_.mask.heads == 1 && token(r) == token(r - 1)) {
        view_[r] = view_[r - 1];
      } else {
        view_[r] = ViewOf(mask_row(key, head, r), count);
      }
      is_seen = is_seen || view_[r] != View::nothing;
    }
    return is_seen;
  }

  // K or V of a block as f32 rows. The next block's rows are fetched meanwhile: those of the next
  // head lie beside these.
  Block unpack(const Rows& rows, uint64_t values, const Place& at, float* block) const {
    const uint64_t stream = item_.stream / (p_.streams / rows.streams);
    const uint8_t* const first = rows.row(at.key, item_.head_begin + at.head, stream);
    const bool last_head = item_.head_begin + at.head + 1 == item_.head_end;
    const uint8_t* next = last_head ? nullptr : first + rows.strides[1];
    if (last_head && at.key + 2 * uint64_t{at.count} <= item_.key_end)
      next = rows.row(at.key + at.count, item_.head_begin, stream);
    const auto count = static_cast<uint32_t>(values);
    UnpackRows(rows.type, {first, rows.strides[0], at.count, count, next}, block);
    return {block, at.count, static_cast<uint32_t>(padded(values))};
  }

  void run_block(const Place& at) {
    const Block k = unpack(p_.k, p_.k_dim, at, k_block_);
    if (!takes_many(rows_)) {  // V in K's place: both would not fit the first-level cache
      FewRows few;
      score_few(at, look_at(0), k, few);
      const Block v = unpack(p_.v, p_.v_dim, at, k_block_);
      return accumulate_few(few, v);
    }
    const Block v = unpack(p_.v, p_.v_dim, at, v_block_);
    for (uint32_t first = 0; first < rows_; first += kTileRows) {
      const Tile tile = look_at(first);
      if (takes_many(tile.seeing)) {
        run_many(at, tile, k, v);
      } else if (tile.seeing > 0) {
        FewRows few;
        score_few(at, tile, k, few);
        accumulate_few(few, v);
      }
    }
  }

  Tile look_at(uint32_t first) const {
    Tile tile{first, std::min(rows_ - first, kTileRows)};
    for (uint32_t r = first; r < first + tile.rows; ++r) {
      tile.seeing += view_[r] != View::nothing;
      tile.uniform = tile.uniform && view_[r] == View::everything;
    }
    return tile;
  }

  void apply_soft_cap(float* logits, uint32_t count) const {
    const DW d;
    const auto cap = hn::Set(d, p_.soft_cap), to_base2 = hn::Set(d, kLog2E);
    for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d)))
      hn::Store(hn::Mul(SoftCap(hn::Load(d, logits + i), cap), to_base2), d, logits + i);
  }

  void add_mask(const Place& at, uint32_t r, float* logits) const {
    const float slope = kLog2E * SlopeOf(p_.max_bias, p_.heads, query_head(at.head, r));
    AddMask(mask_row(at.key, at.head, r), at.count, slope, logits);
  }

  struct FewRows {
    RowSet rows;
    float rescale[kTileRows];
    bool uniform = true;
  };

  void score_few(const Place& at, const Tile& tile, const Block& k, FewRows& few) {
    RowSet& rows = few.rows;
    few.uniform = tile.uniform;
    uint32_t which[kTileRows];
    for (uint32_t r = tile.first; r < tile.first + tile.rows; ++r) {
      if (view_[r] == View::nothing) continue;
      which[rows.count] = r;
      rows.q[rows.count] = q_ + (at.head * rows_ + r) * dk_;
      rows.acc[rows.count] = acc(at.head, r);
      rows.logits[rows.count] = logits_ + uint64_t{rows.count} * kBlockKeys;
      ++rows.count;
    }
    ForRowGroups(rows.count,
                 [&](auto group, uint32_t row) { ScoreFew<decltype(group)::value>(rows, row, k); });
    for (uint32_t i = 0; i < rows.count; ++i) {
      const uint32_t r = which[i];
      float* const logits = rows.logits[i];
      if (p_.soft_cap > 0) apply_soft_cap(logits, at.count);
      if (view_[r] == View::some) add_mask(at, r, logits);
      const uint32_t whole = (at.count + 7) / 8 * 8;
      std::fill(logits + at.count, logits + whole, kMinusInfinity);
      few.rescale[i] = FoldLogits(logits, whole, 1.0f, states_[at.head * rows_ + r]);
    }
  }

  // A value that some row does not see may be NaN, and 0 times NaN is NaN: then each row leaves out
  // what it does not see.
  static void accumulate_few(const FewRows& few, const Block& v) {
    const RowSet& rows = few.rows;
    if (!few.uniform && !IsFinite(v)) {
      for (uint32_t i = 0; i < rows.count; ++i)
        AccumulateSeen(rows.logits[i], 1, few.rescale[i], v, rows.acc[i]);
      return;
    }
    ForRowGroups(rows.count, [&](auto group, uint32_t row) {
      AccumulateFew<decltype(group)::value>(rows, row, few.rescale, v);
    });
  }

  void run_many(const Place& at, const Tile& tile, const Block& k, const Block& v) {
    const float* const q = columns(at.head, tile.first);
    const auto lanes = static_cast<uint32_t>(hn::Lanes(DW()));
    uint32_t r = 0;
    for (; r + lanes < tile.rows; r += 2 * lanes) ScoreMany<2>(k, q + r, logits_ + r);
    if (r < tile.rows) ScoreMany<1>(k, q + r, logits_ + r);
    if (p_.soft_cap > 0) apply_soft_cap(logits_, at.count * kTileRows);
    if (!tile.uniform) add_masks(at, tile);
    alignas(64) float rescale[kTileRows];
    fold_many(at, tile, rescale);
    float* const sums = acc(at.head, tile.first);
    if (!tile.uniform && !IsFinite(v)) {
      for (r = 0; r < tile.rows; ++r)
        AccumulateSeen(logits_ + r, kTileRows, rescale[r], v, sums + uint64_t{r} * dv_);
      return;
    }
    uint32_t c = 0;
    for (; c + 2 * lanes <= dv_; c += 2 * lanes)
      AccumulateMany<2>(logits_, rescale, tile.rows, v, c, sums);
    for (; c < dv_; c += lanes) AccumulateMany<1>(logits_, rescale, tile.rows, v, c, sums);
  }

  // Logits lie as [cell][row]: a row's are gathered, masked and put back.
  void add_masks(const Place& at, const Tile& tile) const {
    for (uint32_t i = 0; i < tile.rows; ++i) {
      float* const column = logits_ + i;
      const uint32_t r = tile.first + i;
      if (view_[r] == View::everything) continue;
      if (view_[r] == View::nothing) {
        for (uint32_t key = 0; key < at.count; ++key) column[key * kTileRows] = kMinusInfinity;
        continue;
      }
      for (uint32_t key = 0; key < at.count; ++key) row_[key] = column[key * kTileRows];
      add_mask(at, r, row_);
      for (uint32_t key = 0; key < at.count; ++key) column[key * kTileRows] = row_[key];
    }
  }

  // FoldLogits for all rows of a tile side by side.
  void fold_many(const Place& at, const Tile& tile, float* rescale) {
    const DW d;
    const auto lanes = static_cast<uint32_t>(hn::Lanes(d));
    SoftmaxState* const states = states_ + at.head * rows_ + tile.first;
    alignas(64) float row[3][kTileRows];  // largest, reference, sum
    for (uint32_t r = 0; r < tile.rows; r += lanes) {
      auto largest = hn::Set(d, kMinusInfinity);
      for (uint32_t key = 0; key < at.count; ++key)
        largest = hn::Max(largest, hn::Load(d, logits_ + uint64_t{key} * kTileRows + r));
      hn::Store(largest, d, row[0] + r);
    }
    std::fill_n(row[1], kTileRows, 0.0f);
    for (uint32_t r = 0; r < tile.rows; ++r) {
      rescale[r] = states[r].raise(row[0][r]);
      row[1][r] = states[r].reference();
    }
    for (uint32_t r = 0; r < tile.rows; r += lanes) {
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
    for (uint32_t r = 0; r < tile.rows; ++r) states[r].sum += row[2][r];
  }

  const Problem& p_;
  const Item& item_;
  const uint32_t rows_, dk_, dv_;
  float *q_, *acc_, *q_columns_, *k_block_, *v_block_, *logits_, *row_;
  SoftmaxState* states_;
  View view_[kMaxItemRows];
};

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
