// One work item's rows: queries in the layouts that its kernels read, what the rows see, and the
// scratch that all of it lies in.

#if defined(GYRE_GGML_ITEM_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_GGML_ITEM_ROWS_INL_H
#undef GYRE_GGML_ITEM_ROWS_INL_H
#else
#define GYRE_GGML_ITEM_ROWS_INL_H
#endif

#include <cmath>

#include "isa/kernels.h"
#include "mask-inl.h"
#include "products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::ggml::HWY_NAMESPACE {
using cpu::HWY_NAMESPACE::SoftmaxState;

class ItemRows {
 public:
  ItemRows(const Problem& problem, const Item& item, float* scratch)
      : p_(problem),
        item_(item),
        group_(problem.group()),
        rows_(static_cast<uint32_t>(item.row_end - item.row_begin)),
        dk_(static_cast<uint32_t>(padded(problem.k_dim))),
        dv_(static_cast<uint32_t>(padded(problem.v_dim))),
        matrix_(rows_ >= kMatrixRows ? matrix_kernels() : nullptr),
        levels_(rows_ < kLevelRows && has_levels(p_.k.type) ? level_kernels() : nullptr),
        many_(levels_ == nullptr && rows_ >= hn::Lanes(DW())) {
    for (uint32_t r = 0; r < rows_; ++r) tokens_[r] = (item.row_begin + r) / group_;
    const uint64_t heads = item.head_end - item.head_begin;
    q_ = scratch;
    acc_ = q_ + heads * rows_ * dk_;
    q_columns_ = acc_ + heads * rows_ * dv_;
    k_block_ = q_columns_ + heads * tiles() * query_tile_floats(dk_);
    v_block_ = k_block_ + kBlockKeys * block_stride(dk_);
    packed_k_ = v_block_ + kBlockKeys * block_stride(dv_);
    packed_v_ = packed_k_ + matrix_floats(dk_);
    logits_ = packed_v_ + matrix_floats(dv_);
    row_ = logits_ + uint64_t{kTileRows} * kBlockKeys;
    states_ = new (row_ + kBlockKeys) SoftmaxState[heads * rows_];
    std::fill_n(acc_, heads * rows_ * dv_, 0.0f);
    for (uint64_t head = 0; head < heads; ++head) {
      load_queries(head);
      if (matrix_ != nullptr && !pack_queries(head)) matrix_ = nullptr;
      if (levels_ != nullptr && !pack_level_queries(head)) levels_ = nullptr;
    }
    for (uint64_t head = 0; matrix_ == nullptr && many_ && head < heads; ++head)
      transpose_queries(head);
  }

  // done(query head, token, state, values) for every row.
  template <class Done>
  void for_rows(const Done& done) {
    for (uint64_t head = 0; head < item_.head_end - item_.head_begin; ++head) {
      for (uint32_t r = 0; r < rows_; ++r)
        done(query_head(head, r), token(r), states_[head * rows_ + r], acc(head, r));
    }
  }

 protected:
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

  uint32_t tiles() const { return (rows_ + kTileRows - 1) / kTileRows; }
  uint64_t token(uint32_t r) const { return tokens_[r]; }
  uint64_t query_head(uint64_t head, uint32_t r) const {
    const uint64_t group = group_, in_group = item_.row_begin + r - tokens_[r] * group;
    return (item_.head_begin + head) * group + in_group;
  }
  float* acc(uint64_t head, uint32_t r) const { return acc_ + (head * rows_ + r) * dv_; }
  float* columns(uint64_t head, uint32_t first) const {
    return q_columns_ + (head * tiles() + first / kTileRows) * query_tile_floats(dk_);
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

  bool pack_queries(uint64_t head) {
    bool fits = true;
    for (uint32_t first = 0; first < rows_; first += kTileRows) {
      const float* const q = q_ + (head * rows_ + first) * dk_;
      fits &=
          matrix_->pack_queries(q, std::min(rows_ - first, kTileRows), dk_, columns(head, first));
    }
    return fits;
  }

  float* level_queries(uint64_t head, uint32_t first) const {
    return columns(head, 0) + first * level_query_floats(p_.k_dim);
  }

  bool pack_level_queries(uint64_t head) {
    bool fits = true;
    for (uint32_t first = 0; first < rows_; first += levels_->rows) {
      const float* const q = q_ + (head * rows_ + first) * dk_;
      fits &= levels_->pack_queries(q, std::min(rows_ - first, levels_->rows), dk_,
                                    static_cast<uint32_t>(p_.k_dim), p_.k.type,
                                    level_queries(head, first));
    }
    return fits;
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

  // K or V of a block, and the rows that are read after them: those of the next head lie beside
  // these.
  RowRun find_rows(const Rows& rows, uint64_t values, const Place& at) const {
    const uint64_t stream = item_.stream / (p_.streams / rows.streams);
    const uint8_t* const first = rows.row(at.key, item_.head_begin + at.head, stream);
    const bool last_head = item_.head_begin + at.head + 1 == item_.head_end;
    const uint8_t* next = last_head ? nullptr : first + rows.strides[1];
    if (last_head && at.key + 2 * uint64_t{at.count} <= item_.key_end)
      next = rows.row(at.key + at.count, item_.head_begin, stream);
    return {first, rows.strides[0], at.count, static_cast<uint32_t>(values), next};
  }

  Tile look_at(uint32_t first) const {
    Tile tile{first, std::min(rows_ - first, kTileRows)};
    for (uint32_t r = first; r < first + tile.rows; ++r) {
      tile.seeing += view_[r] != View::nothing;
      tile.uniform = tile.uniform && view_[r] == View::everything;
    }
    return tile;
  }

  const Problem& p_;
  const Item& item_;
  const uint64_t group_;
  const uint32_t rows_, dk_, dv_;
  const MatrixKernels* matrix_;  // null: not used
  const LevelKernels* levels_;   // null: not used
  const bool many_;              // rows are worth a vector each along them
  float *q_, *acc_, *q_columns_, *k_block_, *v_block_, *packed_k_, *packed_v_, *logits_, *row_;
  SoftmaxState* states_;
  uint64_t tokens_[kMaxItemRows];  // of rows
  View view_[kMaxItemRows];
};

}  // namespace gyre::ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
