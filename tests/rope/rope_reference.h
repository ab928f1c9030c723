#pragma once
// Rotary embeddings as the specification (5.1 to 5.3) writes them down: pair by pair, in more
// precision than any kernel. Shares no code with the library.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>
#include <vector>

#include "gyre/rope.h"

namespace gyre::reference {

constexpr long double kTurn = 2 * std::numbers::pi_v<long double>;

inline uint64_t rotary_dim(const RopeOptions& o, uint64_t head_dim) {
  return o.rotary_dim ? *o.rotary_dim : head_dim;
}

inline uint64_t rope_pairs(const RopeOptions& o, uint64_t head_dim) {
  return rotary_dim(o, head_dim) / 2;
}

inline uint32_t rope_axes(RopeMode mode) {
  if (mode == RopeMode::plain) return 1;
  return mode == RopeMode::vision_2d ? 2 : 4;
}

struct RopePair {
  uint64_t u = 0, v = 0;
};

inline RopePair rope_pair(const RopeOptions& o, uint64_t head_dim, uint64_t p) {
  if (o.pairing == RopePairing::adjacent) return {2 * p, 2 * p + 1};
  if (o.mode == RopeMode::vision_2d) {
    const uint64_t quarter = head_dim / 4;
    if (p < quarter) return {p, p + quarter};
    const uint64_t i = p - quarter;
    return {head_dim / 2 + i, head_dim / 2 + i + quarter};
  }
  const uint64_t span = o.partner == RopeSpan::rotary_dim ? rotary_dim(o, head_dim) : head_dim;
  return {p, p + span / 2};
}

inline uint64_t rope_sector(const RopeOptions& o, uint64_t p) {
  uint64_t sum = uint64_t{o.sections[0]} + o.sections[1];
  if (o.mode != RopeMode::vision) sum += uint64_t{o.sections[2]} + o.sections[3];
  return p % std::max<uint64_t>(1, sum);
}

inline uint32_t rope_axis(const RopeOptions& o, uint64_t head_dim, uint64_t p) {
  const uint64_t sector = rope_sector(o, p), s0 = o.sections[0], s1 = o.sections[1];
  const uint64_t s2 = o.sections[2];
  switch (o.mode) {
    case RopeMode::plain:
      return 0;
    case RopeMode::sectioned:
      if (sector < s0) return 0;
      if (sector < s0 + s1) return 1;
      return sector < s0 + s1 + s2 ? 2 : 3;
    case RopeMode::interleaved:
      if (sector % 3 == 0 && sector < 3 * s0) return 0;
      if (sector % 3 == 1 && sector < 3 * s1) return 1;
      if (sector % 3 == 2 && sector < 3 * s2) return 2;
      return 3;
    case RopeMode::vision:
      return sector < s0 ? 0 : 1;
    case RopeMode::vision_2d:
      break;
  }
  return p < head_dim / 4 ? 0 : 1;
}

// x of base^(-x).
inline long double rope_exponent(const RopeOptions& o, uint64_t head_dim, uint64_t p) {
  const auto dim = static_cast<long double>(head_dim);
  if (o.mode == RopeMode::vision) {
    const uint64_t q = rope_sector(o, p) - (rope_axis(o, head_dim, p) == 1 ? o.sections[0] : 0);
    return 2 * static_cast<long double>(q) / (dim / 2);
  }
  if (o.mode == RopeMode::vision_2d) {
    return 2 * static_cast<long double>(p % (head_dim / 4)) / (dim / 2);
  }
  const auto rotary = static_cast<long double>(rotary_dim(o, head_dim));
  return 2 * static_cast<long double>(p) / (o.exponent == RopeSpan::rotary_dim ? rotary : dim);
}

inline std::vector<long double> rope_frequencies(const RopeOptions& o, uint64_t head_dim) {
  std::vector<long double> radians;
  for (uint64_t p = 0; p < rope_pairs(o, head_dim); ++p) {
    radians.push_back(std::pow(static_cast<long double>(o.base), -rope_exponent(o, head_dim, p)));
  }
  return radians;
}

// position * frequency less whole turns. The product of a 31-bit position and a 64-bit (or longer)
// mantissa keeps 2^-33 of a turn; only then may the rest become a double.
inline double rope_angle(long double frequency, int64_t position) {
  const long double turns = static_cast<long double>(position) * (frequency / kTurn);
  return static_cast<double>((turns - std::round(turns)) * kTurn);
}

struct RopeTurn {
  RopePair pair;
  double cosine = 1;  // times the magnitude
  double sine = 0;
};

// One token's turns; `positions` has an entry per axis.
inline std::vector<RopeTurn> rope_turns(const RopeOptions& o, uint64_t head_dim,
                                        std::span<const long double> frequencies,
                                        std::span<const int64_t> positions) {
  std::vector<RopeTurn> turns;
  for (uint64_t p = 0; p < rope_pairs(o, head_dim); ++p) {
    const double angle = rope_angle(frequencies[p], positions[rope_axis(o, head_dim, p)]);
    turns.push_back(
        {rope_pair(o, head_dim, p), std::cos(angle) * o.magnitude, std::sin(angle) * o.magnitude});
  }
  return turns;
}

struct RopeHead {
  std::vector<double> value;
  std::vector<bool> rotated;
  std::vector<double> size;  // of a rotated value, for bounds: |u| + |v| times the magnitude
};

inline RopeHead rope_head(std::span<const double> x, std::span<const RopeTurn> turns) {
  RopeHead head{
      {x.begin(), x.end()}, std::vector<bool>(x.size(), false), std::vector<double>(x.size(), 0.0)};
  for (const RopeTurn& t : turns) {
    const double u = x[t.pair.u], v = x[t.pair.v];
    head.value[t.pair.u] = u * t.cosine - v * t.sine;
    head.value[t.pair.v] = u * t.sine + v * t.cosine;
    head.rotated[t.pair.u] = head.rotated[t.pair.v] = true;
    const double size = (std::abs(u) + std::abs(v)) * std::hypot(t.cosine, t.sine);
    head.size[t.pair.u] = head.size[t.pair.v] = size;
  }
  return head;
}

// y = x * 1/sqrt(mean(x^2) + epsilon) * weight.
inline std::vector<double> head_norm(std::span<const double> x, std::span<const double> weight,
                                     double epsilon) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  const double scale = 1 / std::sqrt(sum / static_cast<double>(x.size()) + epsilon);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

}  // namespace gyre::reference
