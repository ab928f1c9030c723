#pragma once
// Decode attention: partial states of warps to those of a block, of blocks to those of a cluster
// (DSMEM), of clusters to rows of the output (global memory, by the last one to arrive).
#include "cuda/kernels/attention/decode/block_state.cuh"
#include "cuda/kernels/attention/decode/row_target.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

// A warp's states and sums to shared memory.
template <class Traits>
inline void write_warp(BlockState& state, float* to, const LaneWeights&,
                       const Float16Sums<Traits>& from) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t h = 0; h < from.kRowTiles; ++h) {
    const FloatRow& r = from.row[h];
    float sum = r.sum + __shfl_xor_sync(kAll, r.sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float scale = Traits::kV == kFormatF16 ? power_of_two(kProbabilityUp) : 1.0f;
    if (j == 0) state.of_warp[warp][g + 8 * h] = {r.max, sum, r.reference, scale};
    WarpSums<Traits>::write(from.sums[h], to + 8 * h * WarpSums<Traits>::kPitch);
  }
}
template <class Traits>
inline void write_warp(BlockState& state, float* to, const LaneWeights& lane_weights,
                       const LevelSums<Traits>& from) {
  constexpr uint32_t kBlocks = Traits::kWarpBlocksV;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
#pragma unroll
  for (uint32_t four = 0; four < from.kRowQuads; ++four) {
    const LevelRow& r = from.row[four];
    const float max = eight_lanes_max(r.max);
    const WarpWeights<Traits> weights(lane_weights, from, four);
    const float scale = common_scale(from, four);
    if (g == 0) state.of_warp[warp][j + 4 * four] = {max, weights.sum, r.reference, scale};
    typename WarpSums<Traits>::Levels levels[kBlocks];
#pragma unroll
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const float of = from.fixed[block][four].scale;
      levels[block].set(weights.levels[block], of > 0 ? scale * inverse_scale(of) : 1.0f / of);
    }
    WarpSums<Traits>::write(from, four, levels, to + 4 * four * WarpSums<Traits>::kPitch);
  }
}

// Without the barriers NVRTC spends minutes on what addresses from shared memory may alias.
inline RowTarget read_target(const BlockState& state, uint32_t r) {
  RowTarget t = state.targets[r];
  t.values = code_motion_barrier(t.values), t.states = code_motion_barrier(t.states);
  t.counter = code_motion_barrier(t.counter), t.out = code_motion_barrier(t.out);
  t.lse = code_motion_barrier(t.lse), t.sink = code_motion_barrier(t.sink);
  return t;
}

// The block's state of a chunk of row r, from the sums of `busy` warps, each kRingBytes behind the
// one before: lane w holds the state of warp w. Warps that share keys have the same probabilities:
// the first one's count. All sums are loaded at once, those of warps without keys as another's with
// weight 0.
template <class Traits>
inline SoftmaxState merge_warp_states(const BlockState& state, const float* sums, uint32_t busy,
                                      uint32_t r, uint32_t chunk, RowChunk<Traits::kRowDim>& row) {
  using Chunk = RowChunk<Traits::kRowDim>;
  using Sums = WarpSums<Traits>;
  constexpr uint32_t kSlices = Traits::kWarpsPerKey;
  constexpr uint32_t kLanes = 16;  // the same states in every 16 lanes
  static_assert(kDecodeMaxWarps <= kLanes);
  constexpr uint32_t kPitch = Traits::kRingBytes / 4;  // floats from warp to warp
  const uint32_t lane = threadIdx.x % kLanes, first = chunk * Chunk::kSize;
  WarpState lane_state = {minus_infinity(), 0, minus_infinity(), 1};
  if (lane < busy) lane_state = state.of_warp[lane][r];
  const float* const from =
      sums + first / Traits::kRowSlice * kPitch + r * Sums::kPitch + first % Traits::kRowSlice;
  constexpr uint32_t kCount = Traits::kMaxWarps / kSlices;
  Chunk x[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i)
    x[i] = Sums::read(from + (i * kSlices < busy ? i * kSlices : 0) * kPitch);
  SoftmaxState all = SoftmaxState::none();
  const SoftmaxState::Factors f =
      all.template merge_max<kLanes>(lane_state.max, lane_state.reference);
  const float weight = f.part * inverse_scale(lane_state.scale);
  float weights[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i)
    weights[i] =
        __shfl_sync(kAll, weight, static_cast<int>(i * kSlices + first / Traits::kRowSlice));
  row.clear();
  row.add(x, weights);
  all.template merge_sum<kLanes>(lane % kSlices == 0 ? lane_state.sum : 0.0f, f);
  return all;
}

// Merges what the block's warps, the blocks of a cluster and the clusters have of each row. A warp
// takes chunks of rows.
template <class Traits>
class BlockReduce {
  static constexpr uint32_t kDim = Traits::kRowDim, kCluster = Traits::kCluster;
  static constexpr uint32_t kParts = Traits::kRowParts;
  static constexpr uint32_t kAtOnce = kCluster == 1 ? 16 : 8;  // clusters merged at a time
  using Chunk = RowChunk<kDim>;
  using Vector = typename Chunk::Vector;
  static constexpr uint32_t kChunks = Chunk::kChunks, kPerLane = Chunk::kPerLane;

 public:
  // `busy` warps had keys. Their sums lie where their rings begin.
  BlockReduce(const DecodeProblem& problem, BlockState& state, unsigned char* shared, uint32_t busy)
      : problem_(problem),
        state_(state),
        sums_(reinterpret_cast<const float*>(shared + Traits::kLayout.ring)),
        staging_(reinterpret_cast<float*>(shared + Traits::kLayout.staging)),
        busy_(busy),
        warp_(warp_index()),
        warps_(blockDim.x / kWarp),
        clusters_(problem.clusters<kCluster>()),
        first_(kCluster == 1 ? 0 : cluster_rank()),
        count_((problem.rows + kCluster - 1 - first_) / kCluster) {}

  // After all warps wrote theirs. `wanted` is AttentionParams::partial.
  void run(uint32_t wanted) {
    __syncthreads();
    if constexpr (kCluster > 1) store_to_owners();
    if (wanted != abi::kAttentionMerged || clusters_ == 1) {
      write_rows(wanted == abi::kAttentionPartial);
      return;
    }
    write_partials();
    if constexpr (kChunks == 1) {
      merge_rows_by_warp();
    } else {
      merge_rows_by_block();
    }
  }

  // Bytes that the blocks of the cluster store into this one's shared memory.
  static uint32_t transaction_bytes(const DecodeProblem& problem) {
    const uint32_t rows = (problem.rows + kCluster - 1 - cluster_rank()) / kCluster;
    return rows * kCluster * (kDim + 2) * 4;
  }

 private:
  // Rows that this block writes: the blocks of a cluster take them in turn.
  uint32_t own_row(uint32_t i) const { return first_ + i * kCluster; }
  RowTarget target(uint32_t i) const { return read_target(state_, own_row(i)); }

  SoftmaxState merge_warps(uint32_t r, uint32_t chunk, Chunk& row) const {
    return merge_warp_states<Traits>(state_, sums_, busy_, r, chunk, row);
  }

  // Stores the block's chunks into the shared memory of the block that writes the row: [block][own
  // row][coordinates, max, sum] in its staging buffer.
  void store_to_owners() {
    cluster_wait();
    const uint32_t each = (problem_.rows + kCluster - 1) / kCluster;  // rows of a block
    for (uint32_t i = warp_; i < problem_.rows * kChunks; i += warps_) {
      const uint32_t r = i / kChunks, chunk = i % kChunks;
      Chunk row;
      const SoftmaxState state = merge_warps(r, chunk, row);
      float* const to = staging_ + (cluster_rank() * each + r / kCluster) * (kDim + 2);
#pragma unroll
      for (uint32_t e = 0; e < kPerLane; e += 2)
        dsmem_store(make_float2(row.x[e], row.x[e + 1]), to + row.offset(chunk) + e,
                    &state_.transactions, r % kCluster);
      if (threadIdx.x % kWarp == 0 && chunk == 0)
        dsmem_store(make_float2(state.max, state.sum), to + kDim, &state_.transactions,
                    r % kCluster);
    }
  }

  // The cluster's state of a chunk of own row i: lane b holds the state of block b.
  SoftmaxState merge_blocks(uint32_t i, uint32_t chunk, Chunk& row) const {
    const uint32_t stride = (problem_.rows + kCluster - 1) / kCluster * (kDim + 2);
    wait_for_transactions(&state_.transactions);
    const float* const from = staging_ + i * (kDim + 2);
    const float2 lane_state =
        *reinterpret_cast<const float2*>(from + threadIdx.x % kCluster * stride + kDim);
    Chunk x[kCluster];
#pragma unroll
    for (uint32_t b = 0; b < kCluster; ++b) {
#pragma unroll
      for (uint32_t e = 0; e < kPerLane; e += 2) {
        const float2 two =
            *reinterpret_cast<const float2*>(from + b * stride + row.offset(chunk) + e);
        x[b].x[e] = two.x, x[b].x[e + 1] = two.y;
      }
    }
    SoftmaxState all = SoftmaxState::none();
    const SoftmaxState::Factors f = all.template merge_max<kCluster>(lane_state.x, lane_state.x);
    float weights[kCluster];
#pragma unroll
    for (uint32_t b = 0; b < kCluster; ++b)
      weights[b] = __shfl_sync(kAll, f.part, static_cast<int>(b));
    row.clear();
    row.add(x, weights);
    all.template merge_sum<kCluster>(lane_state.y, f);
    return all;
  }

  SoftmaxState merge_own(uint32_t i, uint32_t chunk, Chunk& row) const {
    if constexpr (kCluster > 1) {
      return merge_blocks(i, chunk, row);
    } else {
      return merge_warps(own_row(i), chunk, row);
    }
  }

  void write_rows(bool partial) {
    for (uint32_t i = warp_; i < count_ * kParts; i += warps_) {
      float x[kDim / kWarp];
      SoftmaxState state;
#pragma unroll
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        Chunk row;
        state = merge_own(i / kParts, chunk, row);
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; ++e) x[chunk * kPerLane + e] = row.x[e];
      }
      store_row<Traits>(target(i / kParts), partial, i % kParts, state, x);
    }
  }

  // This cluster's partial states, to global memory.
  void write_partials() {
    const uint32_t cluster = blockIdx.x / kCluster;
    for (uint32_t i = warp_; i < count_ * kChunks; i += warps_) {
      Chunk row;
      const SoftmaxState state = merge_own(i / kChunks, i % kChunks, row);
      const RowTarget t = target(i / kChunks);
      float* const to = pointer<float>(t.values) + cluster * kDim + row.offset(i % kChunks);
      *reinterpret_cast<Vector*>(to) = row.all;
      if (threadIdx.x % kWarp == 0 && i % kChunks == 0)
        pointer<float2>(t.states)[cluster] = make_float2(state.max, state.sum);
    }
  }

  // Counts this cluster's partial of a row: whether it was the last one.
  bool arrive_last(const RowTarget& t) const {
    auto* const counter = pointer<uint32_t>(t.counter);
    const bool last = atomic_add_acq_rel(counter) + 1 == clusters_;
    if (last) *counter = 0;  // for the next replay
    return last;
  }

  // What all clusters wrote of a chunk: lane c holds the state of cluster c, kAtOnce at a time.
  SoftmaxState merge_clusters(const RowTarget& t, uint32_t chunk, Chunk& row) const {
    constexpr uint32_t kStride = kDim / kPerLane;  // vectors from cluster to cluster
    const uint32_t lane = threadIdx.x % kAtOnce;
    const auto* from =
        reinterpret_cast<const Vector*>(pointer<const float>(t.values) + row.offset(chunk));
    const auto* const states = pointer<const float2>(t.states);
    SoftmaxState all = SoftmaxState::none();
    row.clear();
    for (uint32_t first = 0; first < clusters_; first += kAtOnce) {
      Chunk x[kAtOnce] = {};
#pragma unroll
      for (uint32_t c = 0; c < kAtOnce; ++c)
        if (first + c < clusters_) x[c].all = load_l2(from + c * kStride);
      from += kAtOnce * kStride;
      float2 lane_state = make_float2(minus_infinity(), 0.0f);
      if (first + lane < clusters_) lane_state = load_l2(states + first + lane);
      const SoftmaxState::Factors f = all.template merge<kAtOnce>({lane_state.x, lane_state.y});
      float weights[kAtOnce];
#pragma unroll
      for (uint32_t c = 0; c < kAtOnce; ++c)
        weights[c] = __shfl_sync(kAll, f.part, static_cast<int>(c));
      row.scale(f.rescale);
      row.add(x, weights);
    }
    return all;
  }

  // Rows of one chunk: a warp counts its own rows, a lane for each, and merges those it was last to
  // write. No warp waits for another.
  void merge_rows_by_warp() {
    const uint32_t lane = threadIdx.x % kWarp;
    __syncwarp();
    const uint32_t asked = warp_ + lane * warps_;
    const bool last = asked < count_ && arrive_last(target(asked));
    uint32_t to_merge = __ballot_sync(kAll, last);
    __syncwarp();
    for (uint32_t i = warp_; to_merge != 0; i += warps_, to_merge /= 2) {
      if (to_merge % 2 == 0) continue;
      Chunk row;
      const SoftmaxState state = merge_clusters(target(i), 0, row);
      store_row<Traits>(target(i), false, 0, state, row.x);
    }
  }

  // Rows of several chunks: the block counts together, chunks meet in the staging buffer.
  void merge_rows_by_block() {
    const uint32_t lane = threadIdx.x % kWarp;
    __syncthreads();
    if (threadIdx.x < count_) state_.last[threadIdx.x] = arrive_last(target(threadIdx.x));
    __syncthreads();
    for (uint32_t i = warp_; i < count_ * kChunks; i += warps_) {
      const uint32_t r = i / kChunks;
      if (!state_.last[r]) continue;
      Chunk row;
      const SoftmaxState state = merge_clusters(target(r), i % kChunks, row);
#pragma unroll
      for (uint32_t e = 0; e < kPerLane; ++e)
        staging_[r * kDim + i % kChunks * Chunk::kSize + lane + e * kWarp] = row.x[e];
      if (lane == 0) state_.of_row[r] = make_float2(state.max, state.sum);
    }
    __syncthreads();
    for (uint32_t i = warp_; i < count_ * kParts; i += warps_) {
      const uint32_t r = i / kParts;
      if (!state_.last[r]) continue;
      float x[kDim / kWarp];
#pragma unroll
      for (uint32_t e = 0; e < kDim / kWarp; ++e) x[e] = staging_[r * kDim + lane + e * kWarp];
      store_row<Traits>(target(r), false, i % kParts, {state_.of_row[r].x, state_.of_row[r].y}, x);
    }
  }

  const DecodeProblem& problem_;
  BlockState& state_;
  const float* sums_;
  float* staging_;
  uint32_t busy_, warp_, warps_, clusters_;
  uint32_t first_, count_;  // own rows
};

}  // namespace gyre::cuda
