#pragma once
// Sines and cosines of the pairs of a token, as on the CPU: the angle is an exact 64-bit fraction
// of a turn, its upper 32 bits go into polynomials for an eighth of a turn.
#include "cuda/kernels/args.cuh"
#include "cuda/kernels/convert.cuh"
#include "cuda/kernels/pack.cuh"
#include "cuda/kernels/shape.cuh"

namespace gyre::cuda {

template <uint32_t kRun>
struct Angles {
  float cosine[kRun], sine[kRun];
};

// Coefficients with the least maximum error, within 7e-8 of the truth, rounding included.
__device__ inline void sincos_of_turn(uint32_t turn, float& sine, float& cosine) {
  const uint32_t quarter = (turn + 0x20000000u) >> 30;
  const auto rest = static_cast<int32_t>(turn - (quarter << 30));
  const float x = static_cast<float>(rest) * 0x1.921fb6p-30f;  // 2 pi / 2^32
  const float x2 = x * x;
  float s = __fmaf_rn(x2, -0x1.98da64p-13f, 0x1.1105b4p-7f);
  s = __fmaf_rn(x2, s, -0x1.555540p-3f);
  s = __fmaf_rn(x * x2, s, x);
  float c = __fmaf_rn(x2, 0x1.9a0258p-16f, -0x1.6c0c8cp-10f);
  c = __fmaf_rn(x2, c, 0x1.55554ap-5f);
  c = __fmaf_rn(x2, c, -0.5f);
  c = __fmaf_rn(x2, c, 1.0f);
  const bool odd = (quarter & 1) != 0;
  // Bit 1 of the quarter is the sign of the sine, bit 1 of the next quarter that of the cosine.
  sine = __uint_as_float(__float_as_uint(odd ? c : s) ^ quarter >> 1 << 31);
  cosine = __uint_as_float(__float_as_uint(odd ? s : c) ^ (quarter + 1) >> 1 << 31);
}

__device__ inline uint64_t turns_from_double(double turns) {
  // From 2^53 on every double is a whole number of turns; the cut keeps the cast in range.
  if (!(fabs(turns) < 0x1p62)) return 0;
  const double fraction = turns - floor(turns);
  return fraction >= 1.0 ? 0 : static_cast<uint64_t>(fraction * 0x1p64);
}

// Turns per position of a pair; a table may lie at any multiple of 4.
__device__ inline uint64_t stored_turns(const Args& args, uint64_t pair) {
  uint32_t words[2];
  load_words(pointer<const uint8_t>(args.at[3] + 8 * pair), words);
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

template <uint32_t kRun>
__device__ void make_angles(const abi::RopeParams& p, const Args& args, uint64_t token,
                            uint64_t pair, Angles<kRun>& angle) {
  const bool stored = p.frequency_kind == abi::kRopeTurns && args.at[4] == 0;
  uint64_t made[kRun];
  uint32_t bad = 0;
  if (!stored) {
#pragma unroll 1
    for (uint32_t i = 0; i < kRun; ++i) {  // rolled up: doubles take registers
      bool broken = false;
      made[i] = made_turns(p, args, pair + i, broken);
      bad |= broken ? 1u << i : 0u;
    }
  }
  uint64_t position = position_of(p, args, token, pair);
#pragma unroll
  for (uint32_t i = 0; i < kRun; ++i) {
    if (p.mode != 0) position = position_of(p, args, token, pair + i);
    const uint64_t turns = stored ? stored_turns(args, pair + i) : made[i];
    float sine, cosine;
    sincos_of_turn(static_cast<uint32_t>(position * turns >> 32), sine, cosine);
    // An angle that cannot be computed must not pass for no rotation.
    const bool broken = (bad >> i & 1) != 0;
    angle.sine[i] = broken ? __uint_as_float(0x7FC00000u) : sine * p.magnitude;
    angle.cosine[i] = broken ? __uint_as_float(0x7FC00000u) : cosine * p.magnitude;
  }
}

}  // namespace gyre::cuda
