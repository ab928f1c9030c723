#pragma once
// Decode attention: what a block does with its queries before the keys come, and a warp with each
// stage of keys.
#include "cuda/kernels/attention/decode/block_state.cuh"
#include "cuda/kernels/attention/decode/pv.cuh"
#include "cuda/kernels/attention/decode/qk.cuh"
#include "cuda/kernels/attention/decode/query.cuh"
#include "cuda/kernels/attention/decode/weights.cuh"

namespace gyre::cuda {

// Queries on their way from global memory to operands. A warp loads its first row, or two where it
// has more than one, before any key: a Q load queued behind a block's K and V takes microseconds.
template <class Traits>
class QueryLoads {
  static constexpr uint32_t kParts = Traits::kQueryParts;
  static constexpr uint32_t kAhead = Traits::kRows * kParts > Traits::kMaxWarps ? 2 : 1;

 public:
  QueryLoads(const abi::AttentionParams& p, const DecodeProblem& problem, uint64_t q, uint32_t warp,
             uint32_t warps)
      : p_(p),
        problem_(problem),
        q_(q),
        warp_(warp),
        warps_(warps),
        is_f32_(p.q_dtype == 0 ? 1 : 0) {
    // The first address is pinned before pdl_wait. With two rows per warp registers are short.
    if constexpr (kAhead == 1) {
      const uint32_t r = warp / kParts;
      first_ = pin(address(r < problem.rows ? r : 0));
      is_f32_ = pin(is_f32_);
    }
  }
  const uint8_t* first() const { return first_; }

  void start() {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t r = (warp_ + i * warps_) / kParts;
      if (r < problem_.rows)
        load_query<Traits>(kAhead == 1 ? first_ : address(r), is_f32_ != 0, bits_[i]);
    }
  }

  // Rows to operands and factors, those of masks too.
  void finish(const Args& args, BlockState& state, unsigned char* shared) {
    auto* const staging = reinterpret_cast<float*>(shared + Traits::kLayout.staging);
    unsigned char* const operands = shared + Traits::kLayout.queries;
    const bool masks = !problem_.plain_logits || problem_.common.all == 0;
    for (uint32_t i = warp_; i < Traits::kRows * kParts; i += warps_) {
      const uint32_t r = i / kParts, part = i % kParts;
      float* const row = staging + r * Traits::kQueryDim;
      if (r < problem_.rows) {
        stage_query<Traits>(p_, problem_, bits_[0], part, row, r, state.factor);
        load_next(i);
        if (masks && part == 0 && threadIdx.x % kWarp == 0)
          state.mask[r] = mask_row(problem_, args.at[arg_alibi_slopes], r);
        __syncwarp();
      }
      if constexpr (Traits::kStage.k_tiles) {
        write_query_slots<Traits>(r < problem_.rows ? row : nullptr, r,
                                  reinterpret_cast<uint2*>(operands), state.factor);
      } else if constexpr (Traits::kLevelsK) {
        write_query_columns<Traits>(r < problem_.rows ? row : nullptr, r, part,
                                    reinterpret_cast<uint2*>(operands), state.factor);
      }
    }
    __syncthreads();
    if constexpr (!Traits::kLevelsK) {
      write_query_rows<Traits>(staging, problem_.rows, reinterpret_cast<uint4*>(operands));
      __syncthreads();
    }
  }

 private:
  const uint8_t* address(uint32_t r) const { return query_address(p_, problem_, q_, r); }
  void load_next(uint32_t i) {
#pragma unroll
    for (uint32_t e = 0; e < Traits::kQueryDim / kWarp; ++e) bits_[0][e] = bits_[kAhead - 1][e];
    const uint32_t next = (i + kAhead * warps_) / kParts;
    if (next < problem_.rows) load_query<Traits>(address(next), is_f32_ != 0, bits_[kAhead - 1]);
  }

  const abi::AttentionParams& p_;
  const DecodeProblem& problem_;
  uint64_t q_;
  uint32_t warp_, warps_, is_f32_;
  const uint8_t* first_ = nullptr;
  QueryBits<Traits> bits_[kAhead];
};

template <class Traits>
using ValueSums = typename Choose<Traits::kLevelsV, LevelSums<Traits>, Float16Sums<Traits>>::type;

// What a warp holds while it walks the keys.
template <class Traits>
struct WarpLoop {
  const abi::AttentionParams& p;
  const DecodeProblem& problem;
  const MaskRow* mask;
  float *transpose, *exchange;  // the warp's buffer; that of all warps
  uint32_t warp;
  Queries<Traits> queries;
  LevelTable table_k, table_v;
  LaneOffsets<Traits> offsets;
  LaneWeights lane;
  uint32_t until_check = kStagesToCheck;
  bool masks, masked = false;   // of all stages, whoever sees them; of the one at hand
  bool parted = false;          // rows see different keys of the stage at hand
  uint32_t first_position = 0;  // of the stage at hand

  WarpLoop(const abi::AttentionParams& params, const DecodeProblem& of, const BlockState& block,
           unsigned char* memory, uint32_t index)
      : WarpLoop(params, of, block.mask, block.table_k, block.table_v,
                 reinterpret_cast<float*>(memory + Traits::kLayout.transpose +
                                          index * Traits::kLayout.transpose_bytes),
                 reinterpret_cast<float*>(memory + Traits::kLayout.exchange), index,
                 Queries<Traits>(memory + Traits::kLayout.queries, block.factor,
                                 index % Traits::kWarpsPerKey, of.rows)) {}
  WarpLoop(const abi::AttentionParams& params, const DecodeProblem& of, const MaskRow* rows,
           const SharedLevelTable& levels_k, const SharedLevelTable& levels_v, float* to_transpose,
           float* to_exchange, uint32_t index, const Queries<Traits>& first)
      : p(params),
        problem(of),
        mask(rows),
        transpose(to_transpose),
        exchange(to_exchange),
        warp(index),
        queries(first),
        table_k(load_table<Traits::kK, Traits::kManyRows>(levels_k)),
        table_v(Traits::kK == Traits::kV ? table_k
                                         : load_table<Traits::kV, Traits::kManyRows>(levels_v)),
        offsets(lane_offsets<Traits>()),
        lane(lane_weights()),
        masks(!of.plain_logits) {}

  // Logits of a stage, in base 2, spread as the MMA over V wants them. `index` counts the warp's
  // stages, `begin` is the stage's first position.
  void logits(const unsigned char* stage, uint32_t index, uint32_t begin,
              typename SpreadV<Traits>::Scores& x) {
    const ScoreExchange<Traits> between = {exchange, index};
    if constexpr (Traits::kLevelsK == Traits::kLevelsV) {
      score<Traits>(table_k, queries, stage, offsets, between, x);
    } else {
      typename SpreadK<Traits>::Scores s;
      score<Traits>(table_k, queries, stage, offsets, between, s);
      transpose_scores<Traits>(s, transpose, x);
    }
    const bool whole = problem.walk.whole(begin), all = problem.seen_by_all(begin);
    masked = masks || !whole || !all;
    parted = problem.common.all == 0 && !(whole && all);
    first_position = begin;
    if (masked) mask_scores<Traits>(p, problem, mask, begin, x);
  }

  void add(const unsigned char* stage, typename SpreadV<Traits>::Scores& x,
           LevelSums<Traits>& sums) {
    constexpr uint32_t kSlicesPerBlock = Traits::kWarpsPerKey / Traits::kBlocksV;
    softmax_weights_levels<Traits>(
        lane, x, stage + Traits::kStage.v_scales + offsets.v_scales,
        warp % Traits::kWarpsPerKey / (kSlicesPerBlock != 0 ? kSlicesPerBlock : 1), masked, sums);
    lane.step(Traits::FormV::kBias != 0 ? Traits::kLaneKeys : 0);
    add_levels<Traits>(table_v, stage + offsets.v[0], stage + offsets.v[1], sums);
    if (--until_check == 0) {
      until_check = kStagesToCheck;
#pragma unroll
      for (uint32_t i = 0; i < sums.kRowQuads; ++i) check_sums(lane, i, sums);
    }
  }
  void add(const unsigned char* stage, typename SpreadV<Traits>::Scores& x,
           Float16Sums<Traits>& sums) {
    constexpr int32_t kHeadroom = Traits::kV == kFormatF16 ? 0 : 10;
#pragma unroll
    for (uint32_t i = 0; i < sums.kRowTiles; ++i)
      softmax_weights_float16<kHeadroom>(x[i], sums.row[i], sums.sums[i]);
    const Float16Weights<Traits> weights(x);
    if (parted) {
      add_by_rows(stage, weights, sums);
    } else {
      add_float16<Traits>(stage, weights, sums);
    }
  }

 private:
  // Rows that see the same keys at a time.
  void add_by_rows(const unsigned char* stage, const Float16Weights<Traits>& weights,
                   Float16Sums<Traits>& sums) const {
    const uint32_t key = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (uint32_t first = 0, end; first < problem.rows; first = end) {
      const MaskRow row = mask[first];
      for (end = first + 1; end < problem.rows; ++end)
        if (mask[end].begin != row.begin || mask[end].end != row.end) break;
      const uint32_t seen[2] = {seen_pair(row, key), seen_pair(row, key + 8)};
      add_float16_of<Traits>(stage, weights, seen, first, end, sums);
    }
  }
  // Bits of two neighbouring 16-bit values: all, if the row sees the key.
  uint32_t seen_pair(const MaskRow& row, uint32_t at) const {
    const auto sees = [&](uint32_t key) {
      const uint32_t of_walk = problem.walk.key_of(first_position + key);
      const uint32_t place = problem.walk_first + of_walk;
      return of_walk != DecodeWalk::kNoKey && place >= row.begin && place < row.end;
    };
    return (sees(at) ? 0xFFFFu : 0) | (sees(at + 1) ? 0xFFFF0000u : 0);
  }
};

}  // namespace gyre::cuda
