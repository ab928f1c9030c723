#pragma once
// Attention of draft tokens: queries from global memory to A fragments. A query becomes integers of
// 16 bits; of each warp's 16 rows of A, row g has the hi bytes of its query g, row g + 8 the lo
// bytes, so that one thread gets both sums.
#include "cuda/kernels/attention/common/wgmma_s8.cuh"
#include "cuda/kernels/attention/many_rows/drafts_state.cuh"
#include "cuda/kernels/attention/many_rows/queries.cuh"

namespace gyre::cuda {

constexpr uint32_t kDraftWarpRows = 8;  // queries of a consumer warp

// Byte of a warp's 16 rows of A: chunks of 16 bytes.
template <class T>
inline uint32_t draft_query_byte(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kOfRow = T::kKRow / 16;
  return chunk / kOfRow * (16 * T::kKRow) + swizzled_byte<T::kKRow>(row, chunk % kOfRow);
}

// A lane's eight coordinates of a row of integers.
template <class T>
inline void store_draft_query(const float (&x)[8], uint32_t row, unsigned char* to) {
  using Lane = LaneQuery<T>;
  uint32_t integers[2][4];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const float value = Lane::kInTurn ? x[i % 2 * 4 + i / 2] : x[i];
    integers[i / 4][i % 4] = static_cast<uint32_t>(__float2int_rn(value));
  }
  const TwoBytePlanes first(integers[0]), second(integers[1]);
  const uint32_t chunk = Lane::chunk() / 2, inside = Lane::chunk() % 2 * 8;
  *reinterpret_cast<uint2*>(to + draft_query_byte<T>(row, chunk) + inside) =
      make_uint2(first.upper, second.upper);
  *reinterpret_cast<uint2*>(to + draft_query_byte<T>(row + kDraftWarpRows, chunk) + inside) =
      make_uint2(first.lower, second.lower);
}

// The warp's rows of a work item, from `first` on: operands to `to`, factors and biases to rows
// `place` and following of the state. `half`: 0 or 1 for rows 0 to 3 or 4 to 7 alone; 2: all.
// Whether the schedule is of another step. All loads are issued together: behind a block's keys
// each takes microseconds.
template <class T>
inline bool load_draft_queries(DraftsState& state, const abi::AttentionRun& run, uint32_t first,
                               uint32_t place, uint32_t half, unsigned char* to) {
  using enum abi::AttentionArg;
  using Lane = LaneQuery<T>;
  constexpr uint32_t kTogether = kWarp / Lane::kLanes, kPasses = kDraftWarpRows / kTogether,
                     kHalf = kPasses / 2, kAtOnce = kHalf < 2 ? 1 : 2;
  constexpr int32_t kExponentBound =
      13;  // 14 bits, so that sums of 256 products with levels have 30
  const abi::AttentionParams& p = state.call;
  const Args& args = state.args;
  const uint64_t q = args.at[arg_q];
  const float logits = p.scale * (p.soft_cap == 0 ? kLog2E : 1.0f);
  const bool aligned = (q | p.q_token_stride | p.q_head_stride) % 8 == 0;
  const uint32_t signs = Lane::signs(), own = threadIdx.x % kWarp / Lane::kLanes;
  const uint32_t length = load_bits(args.at[arg_kv_lengths], run.sequence, true),
                 token_now = load_bits(args.at[arg_cu_seqlens_q], run.sequence, true);
  const auto address = [&](uint32_t pass) {
    const uint32_t r = first + pass * kTogether + own;
    const uint32_t row = run.first_row + (r < run.rows ? r : 0), token = row / p.group;
    return q + (run.first_token + token) * p.q_token_stride +
           (run.kv_head * p.group + row - token * p.group) * p.q_head_stride;
  };
  const uint32_t from = half == 1 ? kHalf : 0, end = half == 0 ? kHalf : kPasses;
  uint32_t touched = 0;
#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass)
    if (pass >= from && pass < end) touched |= Lane::touch(address(pass), p.q_dtype);
  optimization_barrier(touched);
#pragma unroll 1
  for (uint32_t pass = from; pass < end; pass += kAtOnce) {
    Lane queries[kAtOnce];
#pragma unroll
    for (uint32_t at = 0; at < kAtOnce; ++at)
      queries[at].load(address(pass + at), p.q_dtype, aligned);
#pragma unroll
    for (uint32_t at = 0; at < kAtOnce; ++at) {
      const uint32_t r = (pass + at) * kTogether + own;
      float x[8];
      const float factor = queries[at].scaled(p.q_dtype, logits, signs, kExponentBound, x);
      store_draft_query<T>(x, r, to);
      int32_t sum = 0;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) sum += __float2int_rn(x[i]);
#pragma unroll
      for (uint32_t by = 1; by < Lane::kLanes; by *= 2)
        sum += __shfl_xor_sync(kAll, sum, static_cast<int>(by));
      if (Lane::chunk() == 0) {
        state.factor[place + r] = factor;
        state.biases[place + r] = sum * static_cast<int32_t>(T::FormK::kBias);
      }
    }
  }
  return length != run.length || token_now != run.first_token;
}

}  // namespace gyre::cuda
