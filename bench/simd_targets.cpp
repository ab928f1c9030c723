#include "simd_targets.h"

#include <cstdint>

#include "hwy/targets.h"

namespace gyre::bench {

std::string simd_targets() {
  std::string names;
  for (auto left = static_cast<uint64_t>(HWY_TARGETS); left != 0; left &= left - 1) {
    const auto target = static_cast<int64_t>(left & (~left + 1));
    if (!names.empty()) names += " ";
    names += hwy::TargetName(target);
  }
  return names;
}

}  // namespace gyre::bench
