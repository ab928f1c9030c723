#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace gyre::bench {

// Runs the contestants in turn, round after round, so that a slow minute of the machine meets all
// of them, and returns the median microseconds of each. `round` counts up, for rotating over
// buffers. `between_rounds` is not timed: it puts back what a round has changed.
using Contestant = std::function<void(uint64_t round)>;
std::vector<double> medians_us(const std::vector<Contestant>& contestants, double seconds,
                               const Contestant& between_rounds = {});

double median(std::vector<double> values);

// How many sets of `bytes` it takes to be sure that none is still in a cache when its turn comes
// again.
uint64_t rotation(uint64_t bytes);

inline double us_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

}  // namespace gyre::bench
