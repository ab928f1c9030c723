#pragma once
// The operands of a RopeCase and what they hold before the call.

#include "gyre_test.h"
#include "rope/rope_case.h"

namespace gyre::test {

enum Operand : size_t {
  kX,
  kOut,
  kSecond,
  kWeight,
  kK,
  kKOut,
  kKSecond,
  kKWeight,
  kPositions,
  kFrequencies,
  kFactors,
  kOperands
};

constexpr size_t kAbsent = ~size_t{0};
using BlockIndex = std::array<size_t, kOperands>;  // where each operand lies

struct RopeStream {
  Operand x, out, second, weight;
};
constexpr RopeStream kStreams[2] = {{kX, kOut, kSecond, kWeight}, {kK, kKOut, kKSecond, kKWeight}};

inline uint64_t stream_count(const RopeCase& c) { return c.k_heads == 0 ? 1 : 2; }
inline bool turns(const RopeCase& c) { return !c.norm || c.norm->turns; }
inline bool has_weight(const RopeCase& c) { return c.norm && c.norm->weight; }
inline bool has_second(const RopeCase& c) { return c.norm && c.norm->second; }

BlockIndex block_index(const RopeCase& c);
reference::KvSide side_of(const RopeCase& c, Operand operand);

using PositionTable = std::vector<std::vector<int64_t>>;  // [axis][token]
PositionTable draw_positions(const RopeCase& c);
std::vector<long double> frequencies_of(const RopeCase& c);  // radians, factors applied

// Inputs filled, outputs with a pattern; `after` as `before`.
std::vector<Block> initial_blocks(const RopeCase& c, const BlockIndex& index);

Tensor position_view(const RopeCase& c, const Tensor& flat);
Tensor frequency_view(const RopeCase& c, const Tensor& flat);

}  // namespace gyre::test
