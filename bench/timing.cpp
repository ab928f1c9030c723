#include "timing.h"

#include <unistd.h>

#include <algorithm>

namespace gyre::bench {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<double> medians_us(const std::vector<Contestant>& contestants, double seconds,
                               const Contestant& between_rounds) {
  constexpr uint64_t kWarmUps = 3, kLeast = 15, kMax = 20000;
  std::vector<std::vector<double>> times(contestants.size());
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t round = 0; round < kWarmUps + kMax; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      contestants[i](round);
      const double us = us_since(begin);
      if (round >= kWarmUps) times[i].push_back(us);
    }
    if (between_rounds) between_rounds(round);
    if (round >= kWarmUps + kLeast && us_since(start) > seconds * 1e6) break;
  }
  std::vector<double> medians;
  medians.reserve(times.size());
  for (auto& of_contestant : times) medians.push_back(median(std::move(of_contestant)));
  return medians;
}

uint64_t rotation(uint64_t bytes) {
  constexpr uint64_t kUnknownCache = 32u << 20;  // some virtual machines do not say
  constexpr uint64_t kMax = 256;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const int64_t reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  const int64_t reported = 0;  // macOS
#endif
  const uint64_t cache = reported > 0 ? static_cast<uint64_t>(reported) : kUnknownCache;
  return std::clamp<uint64_t>(2 * cache / std::max<uint64_t>(bytes, 1) + 1, 2, kMax);
}

}  // namespace gyre::bench
