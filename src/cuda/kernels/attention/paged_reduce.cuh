#pragma once
// Decode attention over pages: a unit's pieces are folded from the oldest on, in the same order and
// with the same arithmetic whether one block has them all or several, in global memory.
#include "cuda/kernels/attention/paged_work.cuh"
#include "cuda/kernels/attention/reduce.cuh"

namespace gyre::cuda {

// A piece of a row over the keys so far.
template <uint32_t kDim>
struct RowFold {
  SoftmaxState state;
  RowPiece<kDim> row;

  static RowFold none() {
    RowFold fold = {SoftmaxState::none(), {}};
    fold.row.clear();
    return fold;
  }
  void add(const RowFold& next) {
    const SoftmaxState::Factors f = state.template merge<1>(next.state);
#pragma unroll
    for (uint32_t e = 0; e < RowPiece<kDim>::kEach; ++e)
      row.x[e] = fma_weighted(next.row.x[e], f.part, fma_weighted(row.x[e], f.keep, 0.0f));
  }
};

// Where a row's result goes.
template <class Traits>
inline RowTarget paged_row_target(const abi::AttentionParams& p, const PagedItem& item,
                                  const Args& args, uint32_t r) {
  const uint32_t row = item.first_row + r, token_of = row / p.group;
  const uint64_t token = uint64_t{item.first_token} + token_of;
  const uint64_t head = uint64_t{item.kv_head} * p.group + (row - token_of * p.group);
  RowTarget target = {};
  if (p.partial == abi::kAttentionStates) {
    target.out = args.at[arg_out] + (token * p.heads + head) * (Traits::kValueDim + 2) * 4;
    return target;
  }
  target.out = args.at[arg_out] + token * p.out_token_stride + head * p.out_head_stride;
  target.out_dtype = p.out_dtype;
  if (args.at[arg_lse] != 0)
    target.lse = args.at[arg_lse] + token * p.lse_token_stride + head * p.lse_head_stride;
  if (args.at[arg_sinks] != 0) target.sink = args.at[arg_sinks] + head * 4;
  return target;
}

template <class Traits>
class PagedReduce {
  static constexpr uint32_t kDim = Traits::kRowDim, kRows = Traits::kRows;
  static constexpr uint32_t kParts = Traits::kRowParts, kHeadDim = Traits::kValueDim;
  using Fold = RowFold<kDim>;
  using Piece = RowPiece<kDim>;
  using Vector = typename Piece::Vector;
  static constexpr uint32_t kPieces = Piece::kPieces, kEach = Piece::kEach;
  static constexpr uint32_t kAtOnce = 8;  // pieces loaded at a time

 public:
  PagedReduce(const abi::AttentionParams& p, const Args& args, BlockState& state, PagedState& paged,
              unsigned char* shared)
      : state_(state),
        paged_(paged),
        fold_(reinterpret_cast<float*>(shared + Traits::kLayout.staging)),
        scratch_(args.at[arg_partial]),
        states_(p.partial == abi::kAttentionStates),
        warp_(warp_index()),
        warps_(blockDim.x / kWarp) {}

  // After all warps wrote theirs to `sums`. `ends`: the block has no more of the unit.
  void run(const PagedItem& item, const float* sums, uint32_t busy, bool ends) {
    const bool first_here = item.begun == 0, whole = first_here && item.ends_unit != 0;
    for (uint32_t i = warp_; i < item.rows * kPieces; i += warps_) {
      Fold next;
      next.state =
          merge_warp_states<Traits>(state_, sums, busy, i / kPieces, i % kPieces, next.row);
      if (item.bad != 0) next.state.sum = __uint_as_float(0x7FC00000u);
      if (!first_here) {
        put_scratch(item, item.piece, i, next);
        continue;
      }
      Fold fold = item.piece == 0 ? Fold::none() : get_shared(i);
      fold.add(next);
      if (ends && !whole) {
        put_scratch(item, item.piece, i, fold);
      } else if (!whole || kPieces > 1) {
        put_shared(i, fold);
      } else if constexpr (kPieces == 1) {
        write(i, fold.state, fold.row.x);
      }
    }
    if (whole && kPieces > 1) write_rows(item);
    if (ends && !whole) join(item);
  }

 private:
  Fold get_shared(uint32_t i) const {
    Fold fold;
    fold.row.all = reinterpret_cast<const Vector*>(fold_ + i * Piece::kSize)[threadIdx.x % kWarp];
    fold.state = {paged_.fold[i].x, paged_.fold[i].y};
    return fold;
  }
  void put_shared(uint32_t i, const Fold& fold) {
    reinterpret_cast<Vector*>(fold_ + i * Piece::kSize)[threadIdx.x % kWarp] = fold.row.all;
    __syncwarp();  // all lanes have read the state before
    if (threadIdx.x % kWarp == 0) paged_.fold[i] = make_float2(fold.state.max, fold.state.sum);
    __syncwarp();
  }

  // States of an area: values [piece][row][coordinate], then {max, sum} [piece][row].
  uint64_t area(const PagedItem& item) const {
    return scratch_ +
           (paged_counters(gridDim.x) + item.area * paged_area_floats(kHeadDim, kRows)) * 4;
  }
  uint64_t values_at(const PagedItem& item, uint32_t piece, uint32_t i) const {
    return area(item) +
           (uint64_t{piece * kRows + i / kPieces} * kDim + Piece::offset(i % kPieces)) * 4;
  }
  uint64_t state_at(const PagedItem& item, uint32_t piece, uint32_t i) const {
    constexpr uint64_t kValues = decode_cut(kHeadDim).most_pieces * kRows * kDim;
    return area(item) + (kValues + (piece * kRows + i / kPieces) * 2) * 4;
  }
  uint64_t counter_at(const PagedItem& item) const { return scratch_ + item.area * 8; }

  void put_scratch(const PagedItem& item, uint32_t piece, uint32_t i, const Fold& fold) const {
    *pointer<Vector>(values_at(item, piece, i)) = fold.row.all;
    if (threadIdx.x % kWarp == 0 && i % kPieces == 0)
      *pointer<float2>(state_at(item, piece, i)) = make_float2(fold.state.max, fold.state.sum);
  }
  Fold get_scratch(const PagedItem& item, uint32_t piece, uint32_t i) const {
    Fold fold;
    fold.row.all = load_l2(pointer<const Vector>(values_at(item, piece, i)));
    const float2 state = load_l2(pointer<const float2>(state_at(item, piece, i)));
    fold.state = {state.x, state.y};
    return fold;
  }

  void write(uint32_t i, const SoftmaxState& state, const float (&x)[kDim / kWarp]) const {
    store_row<Traits>(read_target(state_, i / kParts), states_, i % kParts, state, x);
  }
  // Rows of several pieces, which different warps folded.
  void write_rows(const PagedItem& item) const {
    __syncthreads();
    for (uint32_t i = warp_; i < item.rows * kParts; i += warps_) {
      float x[kDim / kWarp];
      SoftmaxState state = SoftmaxState::none();
#pragma unroll
      for (uint32_t piece = 0; piece < kPieces; ++piece) {
        const Fold fold = get_shared(i / kParts * kPieces + piece);
        state = fold.state;
#pragma unroll
        for (uint32_t e = 0; e < kEach; ++e) x[piece * kEach + e] = fold.row.x[e];
      }
      write(i, state, x);
    }
  }

  // A unit of several blocks: the last one to count its pieces folds them all. The first left one
  // state for all of its own.
  void join(const PagedItem& item) {
    __syncthreads();
    if (threadIdx.x == 0) {
      auto* const counter = pointer<uint32_t>(counter_at(item));
      if (item.begun == 0) counter[1] = item.piece + 1;
      const uint32_t mine = item.piece + 1 - item.begun;
      const bool last = atomic_add_acq_rel(counter, mine) + mine == item.pieces;
      if (last) *counter = 0;  // for the next replay
      paged_.last_to_come = last ? 1 : 0;
    }
    __syncthreads();
    if (paged_.last_to_come == 0) return;
    const uint32_t done = load_l2(pointer<const uint32_t>(counter_at(item)) + 1);
    for (uint32_t i = warp_; i < item.rows * kPieces; i += warps_) {
      Fold fold = get_scratch(item, done - 1, i);
#pragma unroll 1
      for (uint32_t first = done; first < item.pieces; first += kAtOnce) {
        Fold next[kAtOnce];
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j)
          next[j] = get_scratch(item, first + j < item.pieces ? first + j : first, i);
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j)
          if (first + j < item.pieces) fold.add(next[j]);
      }
      if constexpr (kPieces == 1) {
        write(i, fold.state, fold.row.x);
      } else {
        put_shared(i, fold);
      }
    }
    if constexpr (kPieces > 1) write_rows(item);
  }

  BlockState& state_;
  PagedState& paged_;
  float* fold_;  // [row][piece of 128 coordinates], where queries are staged before
  uint64_t scratch_;
  bool states_;
  uint32_t warp_, warps_;
};

}  // namespace gyre::cuda
