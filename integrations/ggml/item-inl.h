// One work item: its rows of queries over its cells, block by block, with an online softmax.

#if defined(GYRE_GGML_ITEM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_ITEM_INL_H
#undef GYRE_GGML_ITEM_INL_H
#else
#define GYRE_GGML_ITEM_INL_H
#endif

#include "item_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {
using cpu::HWY_NAMESPACE::Exp2;
using cpu::HWY_NAMESPACE::FoldLogits;
using cpu::HWY_NAMESPACE::SoftCap;

class ItemRun : public ItemRows {
 public:
  using ItemRows::ItemRows;

  void run() {
    // Few rows: a block of K or V stays in the first-level cache.
    const bool whole = matrix_ != nullptr || many_;
    const uint32_t step = whole ? kBlockKeys : kBlockKeys / 2;
    const uint64_t heads = item_.head_end - item_.head_begin;
    TileShape before;
    if (matrix_ != nullptr) matrix_->enter(before);
    for (uint64_t key = item_.key_begin; key < item_.key_end; key += step) {
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(item_.key_end - key, step));
      bool is_seen = false;
      for (uint64_t head = 0; head < heads; ++head) {
        if (head == 0 || p_.mask.heads > 1) is_seen = find_views(key, count, head);
        if (is_seen) run_block({key, count, head});
      }
    }
    if (matrix_ != nullptr) matrix_->leave(before);
  }

 private:
  // K or V of a block as f32 rows.
  Block unpack(const Rows& rows, uint64_t values, const Place& at, float* block) const {
    UnpackRows(rows.type, find_rows(rows, values, at), block);
    return {block, at.count, static_cast<uint32_t>(padded(values))};
  }

  void run_block(const Place& at) {
    if (matrix_ == nullptr && !many_) {
      FewRows few;
      collect_rows(at, look_at(0), few);
      // V in K's place: both would not fit the first-level cache.
      if (levels_ == nullptr || !score_levels(at))
        score_few(few, unpack(p_.k, p_.k_dim, at, k_block_));
      fold_few(at, few);
      return accumulate_few(few, unpack(p_.v, p_.v_dim, at, k_block_));
    }
    const bool packed = matrix_ != nullptr && pack(at);
    Block k{}, v{};
    if (!packed) {
      k = unpack(p_.k, p_.k_dim, at, k_block_);
      v = unpack(p_.v, p_.v_dim, at, v_block_);
    }
    for (uint32_t first = 0; first < rows_; first += kTileRows) {
      const Tile tile = look_at(first);
      if (tile.seeing == 0) continue;
      if (packed) {
        run_packed(at, tile);
      } else if (matrix_ == nullptr && tile.seeing >= hn::Lanes(DW())) {
        run_many(at, tile, k, v);
      } else {
        FewRows few;
        collect_rows(at, tile, few);
        score_few(few, k);
        fold_few(at, few);
        accumulate_few(few, v);
      }
    }
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
    uint32_t which[kTileRows];
    float rescale[kTileRows];
    bool uniform = true;
  };

  // The tile's rows that see something.
  void collect_rows(const Place& at, const Tile& tile, FewRows& few) const {
    RowSet& rows = few.rows;
    few.uniform = tile.uniform;
    for (uint32_t r = tile.first; r < tile.first + tile.rows; ++r) {
      if (view_[r] == View::nothing) continue;
      few.which[rows.count] = r;
      rows.q[rows.count] = q_ + (at.head * rows_ + r) * dk_;
      rows.acc[rows.count] = acc(at.head, r);
      rows.logits[rows.count] = logits_ + uint64_t{r - tile.first} * kBlockKeys;
      ++rows.count;
    }
  }

  static void score_few(const FewRows& few, const Block& k) {
    ForRowGroups(few.rows.count, [&](auto group, uint32_t row) {
      ScoreFew<decltype(group)::value>(few.rows, row, k);
    });
  }

  // All rows' scores from K's codes; false if that needs f32.
  bool score_levels(const Place& at) const {
    const RowRun run = find_rows(p_.k, p_.k_dim, at);
    LevelScores job{run.rows, run.stride, run.next, p_.k.type, run.count, run.values};
    for (uint32_t first = 0; first < rows_; first += levels_->rows) {
      job.q = level_queries(at.head, first);
      job.rows = std::min(rows_ - first, levels_->rows);
      job.logits = logits_ + uint64_t{first} * kBlockKeys;
      if (!levels_->score(job)) return false;
    }
    return true;
  }

  void fold_few(const Place& at, FewRows& few) {
    const uint32_t whole = (at.count + 7) / 8 * 8;
    for (uint32_t i = 0; i < few.rows.count; ++i)
      few.rescale[i] = fold_row(at, few.which[i], whole, few.rows.logits[i]);
  }

  // Makes weights of a row's logits; those from the block's last cell to `whole` become 0.
  float fold_row(const Place& at, uint32_t r, uint32_t whole, float* logits) {
    if (p_.soft_cap > 0) apply_soft_cap(logits, at.count);
    if (view_[r] == View::some) add_mask(at, r, logits);
    std::fill(logits + at.count, logits + whole, kMinusInfinity);
    return FoldLogits(logits, whole, 1.0f, states_[at.head * rows_ + r]);
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

  // False if the block has numbers that the matrix unit does not take.
  bool pack(const Place& at) {
    k_operand_ = v_operand_ = MatrixOperand::hi;
    for (uint32_t slice = 0; slice < kBlockKeys / kMatrixSlice; ++slice) {
      const uint32_t first = slice * kMatrixSlice;
      const uint32_t count = first < at.count ? std::min(at.count - first, kMatrixSlice) : 0;
      const Place cells{at.key + (count > 0 ? first : 0), count, at.head};
      const auto pack_one = [&](const Rows& rows, uint64_t dim, auto pack_rows, float* to) {
        const Block block = unpack(rows, dim, cells, k_block_);
        return pack_rows({block.values, block.stride(), block.keys, block.dim}, slice, to);
      };
      k_operand_ = worse(k_operand_, pack_one(p_.k, p_.k_dim, matrix_->pack_keys, packed_k_));
      v_operand_ = worse(v_operand_, pack_one(p_.v, p_.v_dim, matrix_->pack_values, packed_v_));
    }
    return k_operand_ != MatrixOperand::unfit && v_operand_ != MatrixOperand::unfit;
  }

  void run_packed(const Place& at, const Tile& tile) {
    matrix_->score(columns(at.head, tile.first), tile.rows, dk_, packed_k_, k_operand_, at.count,
                   logits_);
    float rescale[kTileRows];
    for (uint32_t i = 0; i < tile.rows; ++i) {
      float* const logits = logits_ + uint64_t{i} * kBlockKeys;
      if (view_[tile.first + i] == View::nothing) {
        std::fill_n(logits, kBlockKeys, 0.0f);
        rescale[i] = 1.0f;
      } else {
        rescale[i] = fold_row(at, tile.first + i, kBlockKeys, logits);
      }
    }
    matrix_->accumulate(logits_, rescale, tile.rows, packed_v_, v_operand_, dv_,
                        acc(at.head, tile.first));
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

  MatrixOperand k_operand_ = MatrixOperand::unfit, v_operand_ = MatrixOperand::unfit;
};

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
