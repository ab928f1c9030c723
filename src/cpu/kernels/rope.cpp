// rope and norm_rope on the CPU. A task is a run of tokens. Every byte of x is read once (a second
// time from L1 with the norm), every byte of out written once. The angles of a token are made once
// and used by all its heads:
//   angle(p) = position(axis(p)) * frequency(p) mod 1    turns in 64-bit fixed point, upper 32 used
//   (u, v) -> (u cos - v sin, u sin + v cos)             f32, rounded once when stored
// Arguments are in kRope's order.
#include "abi/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/kernels/select.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/rope.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h
#include "cpu/kernels/rope_rows-inl.h"
#include "cpu/kernels/sincos-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

inline uint64_t LoadTurns(const std::byte* table, uint64_t pair) {
  uint64_t turns = 0;
  std::memcpy(&turns, table + pair * sizeof(turns), sizeof(turns));
  return turns;
}

inline uint64_t TurnsFromDouble(double turns) {
  // From 2^53 on every double is a whole number of turns; the cut keeps the cast in range.
  if (!(std::fabs(turns) < 0x1p62)) return 0;
  const double fraction = turns - std::floor(turns);
  return fraction >= 1.0 ? 0 : static_cast<uint64_t>(fraction * 0x1p64);
}

inline double TurnsOfPair(const abi::RopeParams& p, const uint64_t* args, uint64_t pair) {
  if (p.frequency_kind == abi::kRopeTurns) {
    // Signed: a table may hold negative frequencies.
    return static_cast<double>(static_cast<int64_t>(
               LoadTurns(pointer<const std::byte>(args[kFrequencies]), pair))) *
           0x1p-64;
  }
  constexpr double kTurnsPerRadian = 0.15915494309189533577;  // 1 / (2 pi)
  return pointer<const float>(args[kFrequencies])[pair] * kTurnsPerRadian;
}

inline void MakeFrequencies(const abi::RopeParams& p, const uint64_t* args, RopeTables& tables) {
  const uint64_t pairs = p.blocks * p.block_pairs;
  const auto* factors = pointer<const float>(args[kFactors]);
  tables.frequency = pointer<const std::byte>(args[kFrequencies]);
  tables.broken_count = 0;
  if (factors != nullptr || p.frequency_kind != abi::kRopeTurns) {
    tables.frequency = reinterpret_cast<const std::byte*>(tables.frequency_made);
    for (uint64_t i = 0; i < pairs; ++i) {
      const double factor = factors != nullptr ? factors[i] : 1.0;
      const double turns = TurnsOfPair(p, args, i) / factor;
      tables.frequency_made[i] = TurnsFromDouble(turns);
      if (!std::isfinite(turns)) tables.broken[tables.broken_count++] = static_cast<uint16_t>(i);
    }
  }
  if (p.mode == 0) return;
  for (uint64_t i = 0; i < pairs; ++i) {
    tables.axis[i] = static_cast<uint8_t>(abi::rope_axis(p, static_cast<uint32_t>(i)));
  }
}

template <class Weight>
void WidenWeight(const abi::RopeParams& p, const Weight* from, float* to) {
  for (uint64_t i = 0; i < p.head_dim; ++i) to[i] = static_cast<float>(from[i]) + p.weight_offset;
}

inline void MakeWeights(const abi::RopeParams& p, const uint64_t* args, RopeTables& tables) {
  for (uint32_t stream = 0; stream < p.streams; ++stream) {
    const uint64_t weight = args[kStreamArgs[stream][2]];
    float* widened = tables.weight[stream];
    switch (p.stream[stream].weight_dtype) {
      case static_cast<uint32_t>(DType::f32):
        WidenWeight(p, pointer<const float>(weight), widened);
        break;
      case static_cast<uint32_t>(DType::f16):
        WidenWeight(p, pointer<const Half>(weight), widened);
        break;
      case static_cast<uint32_t>(DType::bf16):
        WidenWeight(p, pointer<const BFloat16>(weight), widened);
        break;
      default:
        std::fill_n(widened, p.head_dim, 1.0f);
    }
  }
}

void MakeTables(const abi::RopeParams& p, const uint64_t* args, bool norm, RopeTables& tables) {
  MakeFrequencies(p, args, tables);
  if (norm) MakeWeights(p, args, tables);
}

// The upper half of position * frequency, once per pair or, for adjacent pairs, once per
// coordinate.
template <bool kAdjacent>
void MakeTurns(const abi::RopeParams& p, const RopeTables& tables, const uint64_t* args,
               uint64_t token, int32_t* turn) {
  const uint64_t pairs = p.blocks * p.block_pairs;
  const auto* positions =
      pointer<const int32_t>(args[kPositions]) + token * p.position_token_stride;
  const uint64_t axes = p.mode == 0 ? 1 : (p.mode == 2 ? 2 : 4);
  uint64_t position[4] = {};
  for (uint64_t axis = 0; axis < axes; ++axis) {
    const int32_t value = positions[axis * p.position_axis_stride];
    position[axis] = p.position_signed != 0 ? static_cast<uint64_t>(int64_t{value})
                                            : static_cast<uint32_t>(value);
  }
  for (uint64_t i = 0; i < pairs; ++i) {
    const uint64_t at = p.mode == 0 ? position[0] : position[tables.axis[i]];
    const auto upper = static_cast<int32_t>(at * LoadTurns(tables.frequency, i) >> 32);
    turn[kAdjacent ? 2 * i : i] = upper;
    if (kAdjacent) turn[2 * i + 1] = upper;
  }
}

// Adjacent pairs carry the sign of the sine with it, so that a vector is one multiply-add with
// neighbours swapped.
template <bool kAdjacent>
void MakeAngles(const abi::RopeParams& p, RopeAngles& angles) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto magnitude = hn::Set(d, p.magnitude);
  const uint64_t count = p.blocks * p.block_pairs * (kAdjacent ? 2 : 1);
  for (uint64_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::Vec<decltype(d)> sine, cosine;
    SinCosOfTurn(d, hn::Load(di, angles.turn + i), sine, cosine);
    sine = hn::Mul(sine, magnitude);
    if (kAdjacent) sine = hn::OddEven(sine, hn::Neg(sine));
    hn::Store(sine, d, angles.sine + i);
    hn::Store(hn::Mul(cosine, magnitude), d, angles.cosine + i);
  }
}

// An angle that cannot be computed must not pass for no rotation.
template <bool kAdjacent>
void SpoilAngles(const RopeTables& tables, RopeAngles& angles) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr uint64_t kEntries = kAdjacent ? 2 : 1;
  for (uint64_t i = 0; i < tables.broken_count; ++i) {
    std::fill_n(angles.cosine + tables.broken[i] * kEntries, kEntries, kNaN);
    std::fill_n(angles.sine + tables.broken[i] * kEntries, kEntries, kNaN);
  }
}

// Weights folded into the angles: a multiplication per pair and token instead of per pair, token
// and head.
template <bool kAdjacent>
RopeFactors Weighted(const abi::RopeParams& p, const float* weight, RopeAngles& angles) {
  const hn::ScalableTag<float> d;
  const uint64_t lanes = hn::Lanes(d);
  float* const cosine_u = angles.weighted[0];
  float* const cosine_v = angles.weighted[1];
  float* const sine_u = angles.weighted[2];
  float* const sine_v = angles.weighted[3];
  for (uint64_t block = 0; block < p.blocks; ++block) {
    const uint64_t first = block * p.block_pairs * (kAdjacent ? 2 : 1);
    const uint64_t count = p.block_pairs * (kAdjacent ? 2 : 1);
    const float* const weight_u = weight + block * p.block_stride;
    const float* const weight_v = weight_u + p.distance;
    // Runs over the end of a block by part of a vector; the next block then overwrites its own
    // entries.
    for (uint64_t i = 0; i < count; i += lanes) {
      const auto cosine = hn::LoadU(d, angles.cosine + first + i);
      const auto sine = hn::LoadU(d, angles.sine + first + i);
      const auto u = hn::LoadU(d, weight_u + i);
      hn::StoreU(hn::Mul(cosine, u), d, cosine_u + first + i);
      if constexpr (kAdjacent) {
        hn::StoreU(hn::Mul(sine, hn::Reverse2(d, u)), d, sine_u + first + i);
      } else {
        const auto v = hn::LoadU(d, weight_v + i);
        hn::StoreU(hn::Mul(cosine, v), d, cosine_v + first + i);
        hn::StoreU(hn::Mul(sine, u), d, sine_u + first + i);
        hn::StoreU(hn::Mul(sine, v), d, sine_v + first + i);
      }
    }
  }
  return {cosine_u, cosine_v, sine_u, sine_v, weight};
}

// The next kRows heads. Between two 16-bit dtypes, from f32 to one, and where there is a second
// output, rows pass through f32: fewer kernel bodies, and nobody waits for these.
template <uint32_t kRows>
HWY_INLINE void DoHeads(const RopeShape& p, const RopeFactors& factors, const RopeHeads& heads,
                        const RopeCode& code, float* scratch) {
  const auto body = [](const RopeCode::Bodies& rows) { return kRows == 1 ? rows.one : rows.four; };
  if (heads.second == 0 && code.direct.one != nullptr) return body(code.direct)(p, factors, heads);
  body(code.to_f32)(p, factors,
                    {.x = heads.x,
                     .x_step = heads.x_step,
                     .out = reinterpret_cast<uintptr_t>(scratch),
                     .out_step = p.head_dim * sizeof(float)});
  for (uint32_t r = 0; r < kRows; ++r) {
    const float* const row = scratch + r * p.head_dim;
    RowFromF32(row, heads.out + r * heads.out_step, code.out, p.head_dim);
    if (heads.second == 0) continue;
    RowFromF32(row, heads.second + r * heads.second_step, static_cast<DType>(heads.second_dtype),
               p.head_dim);
  }
}

void RotateHeads(const abi::RopeParams& params, const RopeFactors& factors, RopeHeads heads,
                 uint64_t count, const RopeCode& code) {
  const RopeShape p(params);
  constexpr uint32_t kBatch = 4;
  alignas(64) float scratch[kBatch * abi::kRopeMaxHeadDim];
  const auto advance = [&](uint64_t rows) {
    heads.x += rows * heads.x_step;
    heads.out += rows * heads.out_step;
    if (heads.second != 0) heads.second += rows * heads.second_step;
  };
  uint64_t head = 0;
  for (; head + kBatch <= count; head += kBatch) {
    DoHeads<kBatch>(p, factors, heads, code, scratch);
    advance(kBatch);
  }
  for (; head < count; ++head) {
    DoHeads<1>(p, factors, heads, code, scratch);
    advance(1);
  }
}

template <bool kAdjacent>
void MakeTokenAngles(const abi::RopeParams& p, const uint64_t* args, const RopeTables& tables,
                     uint64_t token, RopeAngles& angles) {
  if (p.block_pairs == 0) return;
  MakeTurns<kAdjacent>(p, tables, args, token, angles.turn);
  MakeAngles<kAdjacent>(p, angles);
  SpoilAngles<kAdjacent>(tables, angles);
}
void MakeTokenAngles(const abi::RopeParams& p, const uint64_t* args, const RopeTables& tables,
                     uint64_t token, bool adjacent, RopeAngles& angles) {
  if (adjacent) return MakeTokenAngles<true>(p, args, tables, token, angles);
  MakeTokenAngles<false>(p, args, tables, token, angles);
}

RopeFactors FactorsOf(const abi::RopeParams& p, const RopeTables& tables, uint32_t stream,
                      const RopeCode& code, RopeAngles& angles) {
  if (!code.norm) return {angles.cosine, angles.cosine, angles.sine, angles.sine, nullptr};
  return code.adjacent ? Weighted<true>(p, tables.weight[stream], angles)
                       : Weighted<false>(p, tables.weight[stream], angles);
}

void RotateTokens(const abi::RopeParams& p, const uint64_t* args, const Share& tokens,
                  const RopeCode& code) {
  RopeTables tables;
  RopeAngles angles;
  MakeTables(p, args, code.norm, tables);
  for (uint64_t token = tokens.begin; token < tokens.end; ++token) {
    MakeTokenAngles(p, args, tables, token, code.adjacent, angles);
    for (uint32_t stream = 0; stream < p.streams; ++stream) {
      const RopeFactors factors = FactorsOf(p, tables, stream, code, angles);
      const abi::RopeStream& s = p.stream[stream];
      const uint32_t* const of = kStreamArgs[stream];
      RotateHeads(p, factors,
                  {.x = args[of[0]] + token * s.x_token_stride,
                   .x_step = s.x_head_stride,
                   .out = args[of[1]] + token * s.out_token_stride,
                   .out_step = s.out_head_stride,
                   .second = args[of[3]] == 0 ? 0 : args[of[3]] + token * s.second_token_stride,
                   .second_step = s.second_head_stride,
                   .second_dtype = s.second_dtype},
                  s.heads, code);
    }
  }
}

template <class In, class Out, bool kAdjacent, bool kNorm>
constexpr RopeCode::Bodies BodiesOf() {
  return {DoRows<kAdjacent, kNorm, 4, In, Out>, DoRows<kAdjacent, kNorm, 1, In, Out>};
}

template <class In, class Out, bool kAdjacent, bool kNorm>
constexpr RopeCode CodeOf() {
  RopeCode code{{}, BodiesOf<In, float, kAdjacent, kNorm>(), DTypeOf<Out>::value, kAdjacent, kNorm};
  if constexpr (std::is_same_v<In, Out> || std::is_same_v<Out, float>)
    code.direct = BodiesOf<In, Out, kAdjacent, kNorm>();
  return code;
}

RopeCode SelectRopeCode(DType dtype, bool adjacent, bool norm) {
  return select_float(static_cast<uint32_t>(dtype), [&](auto row) {
    using T = decltype(row);
    if (norm) return adjacent ? CodeOf<T, T, true, true>() : CodeOf<T, T, false, true>();
    return adjacent ? CodeOf<T, T, true, false>() : CodeOf<T, T, false, false>();
  });
}

template <class In, class Out, bool kAdjacent, bool kNorm>
void Rope(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  static constexpr RopeCode kCode = CodeOf<In, Out, kAdjacent, kNorm>();
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  RotateTokens(p, args, share_of(p.tokens, task, tasks), kCode);
}

template <class In, class Out>
TaskFn SelectVariant(const abi::RopeSpec& spec) {
  if (spec.norm != 0) {
    return spec.adjacent != 0 ? Rope<In, Out, true, true> : Rope<In, Out, false, true>;
  }
  return spec.adjacent != 0 ? Rope<In, Out, true, false> : Rope<In, Out, false, false>;
}

TaskFn SelectRope(uint64_t key) {
  const auto spec = spec_from_key<abi::RopeSpec>(key);
  return select_float(spec.x_dtype, [&](auto x) {
    return select_float(spec.out_dtype,
                        [&](auto out) { return SelectVariant<decltype(x), decltype(out)>(spec); });
  });
}

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(SelectRope);

TaskFn select_rope(uint64_t spec) { return HWY_DYNAMIC_DISPATCH(SelectRope)(spec); }

uint32_t rope_tasks(const void* params, uint64_t /*spec*/) {
  constexpr uint64_t kElementsPerTask =
      16 << 10;  // a few microseconds; the tables of a task cost a tenth of one
  const auto& p = *static_cast<const abi::RopeParams*>(params);
  const uint64_t heads = p.stream[0].heads + (p.streams == 2 ? p.stream[1].heads : 0);
  const uint64_t wanted = p.tokens * heads * p.head_dim / kElementsPerTask;
  return task_count(wanted, p.tokens);
}

}  // namespace gyre::cpu
#endif
