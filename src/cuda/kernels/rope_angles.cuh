#pragma once
// Sines and cosines of the pairs of a token, as on the CPU: the angle is an exact 64-bit fraction
// of a turn, its upper 32 bits go into polynomials for an eighth of a turn. A block makes those of
// its tokens once, for all their heads.
#include "abi/angles.h"
#include "cuda/kernels/block_work.cuh"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/kernel_args.cuh"

namespace gyre::cuda {

template <uint32_t kRun>
struct Angles {
  float cosine[kRun], sine[kRun];
};

struct DeviceOps {
  __device__ float fma(float a, float b, float c) const { return __fmaf_rn(a, b, c); }
  __device__ float float_of(uint32_t bits) const { return __uint_as_float(bits); }
  __device__ uint32_t bits_of(float x) const { return __float_as_uint(x); }
};

__device__ inline uint64_t turns_from_double(double turns) {
  // From 2^53 on every double is a whole number of turns; the cut keeps the cast in range.
  if (!(fabs(turns) < 0x1p62)) return 0;
  const double fraction = turns - floor(turns);
  return fraction >= 1.0 ? 0 : static_cast<uint64_t>(fraction * 0x1p64);
}

// Turns per position of a pair; a table may lie at any multiple of 4.
__device__ inline uint64_t stored_turns(const Args& args, uint64_t pair) {
  const uint32_t* const words = pointer<const uint32_t>(args.at[3]) + 2 * pair;
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

// Those that are not in a table as they are. Sets `broken` where one is not finite.
__device__ inline uint64_t made_turns(const abi::RopeParams& p, const Args& args, uint64_t pair,
                                      bool& broken) {
  constexpr double kTurnsPerRadian = 0.15915494309189533577;  // 1 / (2 pi)
  // Signed: a table may turn backwards.
  double turns = p.frequency_kind == abi::kRopeTurns
                     ? static_cast<double>(static_cast<int64_t>(stored_turns(args, pair))) * 0x1p-64
                     : pointer<const float>(args.at[3])[pair] * kTurnsPerRadian;
  if (args.at[4] != 0) turns = turns / static_cast<double>(pointer<const float>(args.at[4])[pair]);
  broken = !(fabs(turns) <= 0x1.fffffffffffffp1023);
  return turns_from_double(turns);
}

__device__ inline uint64_t position_of(const abi::RopeParams& p, const Args& args, uint64_t token,
                                       uint64_t pair) {
  const uint32_t axis = p.mode == 0 ? 0 : abi::rope_axis(p, static_cast<uint32_t>(pair));
  const int32_t value = pointer<const int32_t>(
      args.at[1])[token * p.position_token_stride + axis * p.position_axis_stride];
  return p.position_signed != 0 ? static_cast<uint64_t>(static_cast<int64_t>(value))
                                : static_cast<uint32_t>(value);
}

// The angles of a block's tokens, in shared memory: a token's cosines, then its sines.
struct AngleTable {
  float* floats;
  uint32_t stride;  // of cosines, of sines

  // XOR swizzle of fours in every other 32: lanes that read eight each then meet different banks.
  __device__ static uint32_t swizzled(uint32_t pair) { return pair ^ (pair >> 3 & 4); }

  __device__ void put(uint32_t token, uint32_t pair, float cosine, float sine) const {
    float* const at = floats + token * 2 * stride + swizzled(pair);
    at[0] = cosine, at[stride] = sine;
  }
  template <uint32_t kRun>
  __device__ void get(uint32_t token, uint32_t pair, Angles<kRun>& angle) const {
    const float* const at = floats + token * 2 * stride;
    if constexpr (kRun == 1) {
      angle.cosine[0] = at[swizzled(pair)], angle.sine[0] = at[stride + swizzled(pair)];
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kRun; i += 4) {
        const auto* const from = reinterpret_cast<const float4*>(at + swizzled(pair + i));
        const float4 cosine = from[0], sine = from[stride / 4];
        angle.cosine[i] = cosine.x, angle.cosine[i + 1] = cosine.y;
        angle.cosine[i + 2] = cosine.z, angle.cosine[i + 3] = cosine.w;
        angle.sine[i] = sine.x, angle.sine[i + 1] = sine.y;
        angle.sine[i + 2] = sine.z, angle.sine[i + 3] = sine.w;
      }
    }
  }
};

// What an angle is made of, as it was loaded.
struct AngleInput {
  uint64_t position, turns;
  bool broken;
};

__device__ inline AngleInput load_angle(const abi::RopeParams& p, const Args& args, uint64_t token,
                                        uint32_t pair) {
  AngleInput input{position_of(p, args, token, pair), 0, false};
  const bool stored = p.frequency_kind == abi::kRopeTurns && args.at[4] == 0;
  input.turns = stored ? stored_turns(args, pair) : made_turns(p, args, pair, input.broken);
  return input;
}

__device__ inline void make_angle(const abi::RopeParams& p, const AngleInput& input, float& cosine,
                                  float& sine) {
  const abi::TurnAngle angle =
      abi::angle_of_turn(static_cast<uint32_t>(input.position * input.turns >> 32), DeviceOps());
  cosine = angle.cosine, sine = angle.sine;
  sine *= p.magnitude, cosine *= p.magnitude;
  // An angle that cannot be computed must not pass for no rotation.
  if (input.broken) sine = cosine = __uint_as_float(0x7FC00000u);
}

// By all threads of the block, a warp or some to a token; who reads the table waits for the block
// first.
__device__ inline void make_angles(const abi::RopeParams& p, const Args& args, uint64_t first,
                                   uint32_t tokens, const AngleTable& table) {
  constexpr uint32_t kWarps = kBlockThreads / 32;
  const uint32_t warp = threadIdx.x / 32, pairs = rope_pairs(p);
  const uint32_t bits = tokens == 1 ? 3 : (tokens == 2 ? 2 : (tokens <= 4 ? 1 : 0));
  const uint32_t begin = (warp & ((1u << bits) - 1)) * 32 + threadIdx.x % 32;
  for (uint32_t token = warp >> bits; token < tokens; token += kWarps >> bits) {
    for (uint32_t pair = begin; pair < pairs; pair += 32u << bits) {
      float cosine, sine;
      make_angle(p, load_angle(p, args, first + token, pair), cosine, sine);
      table.put(token, pair, cosine, sine);
    }
  }
}

}  // namespace gyre::cuda
