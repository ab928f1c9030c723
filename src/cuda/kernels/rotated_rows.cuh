#pragma once
// A row of K on its way to a cache: the warp that will store it rotates it into shared memory, in
// the dtype that rope would leave it in.
#include "cuda/kernels/block_instructions.cuh"
#include "cuda/kernels/rope_rows.cuh"

namespace gyre::cuda {

// Angles made where they are used: a row is rotated once.
struct MadeAngles {
  const abi::RopeParams& p;
  const Args& args;
  uint64_t token;

  template <uint32_t kRun>
  __device__ void get(uint32_t pair, Angles<kRun>& angle) const {
#pragma unroll
    for (uint32_t i = 0; i < kRun; ++i)
      make_angle(p, load_angle(p, args, token, pair + i), angle.cosine[i], angle.sine[i]);
  }
};

struct RowSource {
  uint64_t x;
  uint64_t token;  // of the step
};

template <class In, bool kAdjacent, bool kNorm>
struct KeyRotation {
  static constexpr bool kRotates = true;
  static constexpr uint32_t kStream = 1, kWeightArg = 6;
  using Item = Rope<In, In, kAdjacent, kNorm, MadeAngles, true>;

  const abi::RopeParams& p;
  const Args& args;
  uint8_t* staged;  // of the block: rows `stride` bytes apart
  uint32_t stride;

  // Rows lie in dynamic shared memory.
  __device__ KeyRotation(const abi::RopeParams& params, const Args& arguments)
      : p(params),
        args(arguments),
        staged(reinterpret_cast<uint8_t*>(dynamic_float4s())),
        stride(staged_stride(params.head_dim, sizeof(In))) {}

  __device__ In* row() const { return reinterpret_cast<In*>(staged + threadIdx.x / 32 * stride); }

  __device__ RopeItem item_of(const RowSource& source) const {
    return {kStream,
            1,
            source.x,
            reinterpret_cast<uint64_t>(row()),
            0,
            args.at[kWeightArg],
            p.stream[kStream].x_head_stride,
            stride,
            0};
  }

  // The norm's sum takes the order that it has in rope: that of as many lanes.
  __device__ void find_scales(const RopeItem& item, const MadeAngles& angles, Item& to) const {
    if constexpr (kNorm) {
      const uint32_t lanes = 1u << rope_lane_bits(p.head_dim, sizeof(In));
      Item same{p, item, angles, threadIdx.x & (lanes - 1), lanes, {}};
      same.find_scales();
#pragma unroll
      for (uint32_t r = 0; r < kRopeRows; ++r) to.scale[r] = same.scale[r];
    }
  }

  // The warp rotates its row, pair by pair, with all loads on their way before the first is needed.
  __device__ void rotate(const RowSource& source) const {
    constexpr uint32_t kAtOnce = 2;  // pairs of a lane
    const RopeItem item = item_of(source);
    const MadeAngles angles{p, args, source.token};
    Item rope{p, item, angles, threadIdx.x & 31, 32, {}};
    const uint32_t pairs = rope_pairs(p);
    bool has_scales = false;
    for (uint32_t first = 0; first < pairs || !has_scales; first += 32 * kAtOnce) {
      RopeRun<In, 1> run[kAtOnce];
      RopeOffsets offsets[kAtOnce];
      AngleInput input[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t pair = first + 32 * i + rope.lane;
        if (pair >= pairs) continue;
        offsets[i] = rope.template offsets_of<1>(pair);
        rope.template load_rows<1>(offsets[i], run[i]);
        input[i] = load_angle(p, args, source.token, offsets[i].pair);
      }
      if (!has_scales) find_scales(item, angles, rope);
      has_scales = true;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i + rope.lane >= pairs) continue;
        Angles<1> angle;
        make_angle(p, input[i], angle.cosine[0], angle.sine[0]);
        rope.template rotate_rows<1>(offsets[i], run[i], angle);
      }
    }
    rope.copy_unrotated();
    __syncwarp();
  }
};

}  // namespace gyre::cuda
