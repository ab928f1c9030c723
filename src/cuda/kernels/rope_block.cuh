#pragma once
// rope by a block of 256 threads: it asks for the first runs of its rows, makes the sines and
// cosines of its tokens while they come, and puts these into shared memory for all heads.
#include "cuda/kernels/attention/common/rotate_row.cuh"
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/rope_rows.cuh"

namespace gyre::cuda {

// Addresses of one stream, Q or K.
struct RopeAddresses {
  uint64_t x, out, weight, second;
};

struct RopeBlock {
  uint32_t x, y;
};

// A item of a block, and its token's offsets in the block.
struct BlockItem {
  RopeItem item;
  uint32_t nth;

  __device__ BlockItem(const abi::RopeParams& p, const RopeAddresses (&at)[2], const RopeWork& work,
                       const RopeBlock& block, uint32_t index) {
    nth = work.tokens == 1 ? 0 : index * work.inverse >> 16;
    uint32_t group = block.y * work.items + index - nth * work.groups;
    uint64_t token = uint64_t{block.x} * work.tokens + nth;
    const bool present = token < p.tokens && nth < work.tokens && group < work.groups;
    if (!present) token = group = nth = 0;
    item.stream = group < work.first ? 0 : 1;
    if (item.stream == 1) group -= work.first;
    const abi::RopeStream& s = p.stream[item.stream];
    const uint32_t head = group * work.rows, left = static_cast<uint32_t>(s.heads) - head;
    item.rows = present ? (left < work.rows ? left : work.rows) : 0;
    const auto of = [&](uint64_t first, uint64_t second) {
      return item.stream == 0 ? first : second;
    };
    item.x = of(at[0].x, at[1].x) + token * s.x_token_stride + head * s.x_head_stride;
    item.out = of(at[0].out, at[1].out) + token * s.out_token_stride + head * s.out_head_stride;
    item.weight = of(at[0].weight, at[1].weight);
    item.second = of(at[0].second, at[1].second);
    if (item.second != 0)
      item.second += token * s.second_token_stride + head * s.second_head_stride;
    item.x_step = s.x_head_stride, item.out_step = s.out_head_stride;
    item.second_step = s.second_head_stride;
  }
};

// Whether all rows begin at multiples of 16 bytes.
__device__ inline bool are_rope_rows_aligned(const abi::RopeParams& p,
                                             const RopeAddresses (&at)[2]) {
  const auto bits = [](const abi::RopeStream& s, const RopeAddresses& a) {
    return a.x | a.out | s.x_token_stride | s.x_head_stride | s.out_token_stride |
           s.out_head_stride;
  };
  const uint64_t second = p.streams == 2 ? bits(p.stream[1], at[1]) : 0;
  return ((bits(p.stream[0], at[0]) | second) & 15) == 0;
}

struct TableAngles {
  AngleTable table;
  uint32_t nth;  // token of the block

  template <uint32_t kRun>
  __device__ void get(uint32_t pair, Angles<kRun>& angle) const {
    table.get(nth, pair, angle);
  }
};

// Positions, frequencies and factors are arguments 1, 3 and 4.
template <class In, class Out, bool kAdjacent, bool kNorm>
__device__ void rope_block(const abi::RopeParams& p, const Args& args, const RopeAddresses (&at)[2],
                           const RopeBlock& block) {
  constexpr uint32_t kRun = rope_run(sizeof(In));
  const uint32_t bits = rope_lane_bits(p.head_dim, sizeof(In)), lanes = 1u << bits;
  const RopeWork work(p, bits);
  const BlockItem mapped(p, at, work, block, threadIdx.x >> bits);
  const TableAngles angles{{dynamic_float4s(), rope_angle_floats(rope_pairs(p))}, mapped.nth};
  Rope<In, Out, kAdjacent, kNorm, TableAngles> rope{
      p, mapped.item, angles, threadIdx.x & (lanes - 1), lanes, {}};
  RopeRun<In, kRun> run;
  const bool aligned = are_rope_rows_aligned(p, at) && are_rope_runs<kAdjacent, kRun>(p);
  const bool early = aligned && rope.lane * kRun < rope_pairs(p);
  // Not aligned, a block may have no whole run: nothing to divide by.
  const RopeOffsets offsets = early ? rope.template offsets_of<kRun>(rope.lane) : RopeOffsets{};
  if (early) rope.template load_rows<kRun>(offsets, run);
  const uint64_t first = uint64_t{block.x} * work.tokens, left = p.tokens - first;
  make_angles(p, args, first, left < work.tokens ? static_cast<uint32_t>(left) : work.tokens,
              angles.table);
  if constexpr (kNorm) rope.find_scales();
  __syncthreads();
  if (early) rope.template rotate_rows<kRun>(offsets, run);
  if (aligned) {
    rope.template rotate<kRun>(rope.lane + lanes);
  } else {
    rope.template rotate<1>(rope.lane);
  }
  rope.copy_unrotated();
}

}  // namespace gyre::cuda
