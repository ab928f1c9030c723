// Rotating rows for other kernels: rope.cpp has the code, once.

#if defined(GYRE_CPU_ROPE_CODE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GYRE_CPU_ROPE_CODE_INL_H
#undef GYRE_CPU_ROPE_CODE_INL_H
#else
#define GYRE_CPU_ROPE_CODE_INL_H
#endif

#include "abi/rope.h"
#include "cpu/kernel.h"
#include "gyre/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

constexpr uint32_t kPositions = 1, kFrequencies = 3, kFactors = 4;     // places of the arguments
constexpr uint32_t kStreamArgs[2][4] = {{0, 2, 5, 6}, {7, 8, 9, 10}};  // x, out, weight, second

constexpr uint64_t kPad = 64;  // vectors may run over the end

// What all tokens of a task share.
struct RopeTables {
  const std::byte* frequency;  // 8 bytes a pair; a table may lie at any multiple of 4
  uint64_t frequency_made[abi::kRopeMaxPairs];  // where they must be computed
  uint8_t axis[abi::kRopeMaxPairs];
  uint16_t broken[abi::kRopeMaxPairs];  // pairs whose frequency is not finite
  uint64_t broken_count;
  float weight[2][abi::kRopeMaxHeadDim + kPad];
};

// What all heads of a token share; the weighted ones, all heads of a stream.
struct RopeAngles {
  alignas(64) int32_t turn[abi::kRopeMaxHeadDim + kPad];
  alignas(64) float cosine[abi::kRopeMaxHeadDim + kPad];
  alignas(64) float sine[abi::kRopeMaxHeadDim + kPad];
  alignas(64) float weighted[4][abi::kRopeMaxHeadDim + kPad];
};

// Factors of one token: out_u = u * cosine_u - v * sine_v, out_v = v * cosine_v + u * sine_u.
// Without weights the two cosines are one array, and so are the sines. Adjacent pairs: out = x *
// cosine + swapped(x) * sine, sign included.
struct RopeFactors {
  const float* cosine_u;
  const float* cosine_v;
  const float* sine_u;
  const float* sine_v;
  const float* weight;  // for coordinates that are not rotated
};

// What the loops over a row need, apart from the rows.
struct RopeShape {
  explicit RopeShape(const abi::RopeParams& p)
      : head_dim(p.head_dim),
        blocks(p.blocks),
        block_pairs(p.block_pairs),
        distance(p.distance),
        block_stride(p.block_stride),
        epsilon(p.epsilon) {}

  uint64_t head_dim, blocks, block_pairs, distance, block_stride;
  float epsilon;
};

// Heads of one token: addresses, and bytes from head to head.
struct RopeHeads {
  uint64_t x, x_step;
  uint64_t out, out_step;
  uint64_t second = 0, second_step = 0;  // 0 if there is none
  uint32_t second_dtype = abi::kRopeNoDtype;
};

// Code for a pair of dtypes. Only rows depend on dtypes; all else exists once.
struct RopeCode {
  using Rows = void (*)(const RopeShape& shape, const RopeFactors& factors, const RopeHeads& heads);
  struct Bodies {
    Rows four, one;  // heads at a time
  };
  Bodies direct;  // null: rows pass through f32
  Bodies to_f32;
  DType out;
  bool adjacent, norm;
};

// For rows that keep their dtype.
RopeCode SelectRopeCode(DType dtype, bool adjacent, bool norm);

void MakeTables(const abi::RopeParams& p, const uint64_t* args, bool norm, RopeTables& tables);

// All streams of a task's tokens.
void RotateTokens(const abi::RopeParams& p, const uint64_t* args, const Share& tokens,
                  const RopeCode& code);

// The angles of a token, before its heads.
void MakeTokenAngles(const abi::RopeParams& p, const uint64_t* args, const RopeTables& tables,
                     uint64_t token, bool adjacent, RopeAngles& angles);
RopeFactors FactorsOf(const abi::RopeParams& p, const RopeTables& tables, uint32_t stream,
                      const RopeCode& code, RopeAngles& angles);
void RotateHeads(const abi::RopeParams& p, const RopeFactors& factors, RopeHeads heads,
                 uint64_t count, const RopeCode& code);

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
