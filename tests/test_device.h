#pragma once

#include <cstdlib>

#include "gyre_test.h"

namespace gyre::test {

inline bool is_available(std::string_view name) {
  const std::vector<DeviceInfo> all = devices();
  return std::ranges::any_of(
      all, [&](const DeviceInfo& info) { return info.name == name && info.available; });
}

// The CPU, unless GYRE_TEST_DEVICE names another.
inline Device test_device() {
  const char* const name = std::getenv("GYRE_TEST_DEVICE");
  return Device::open(name != nullptr ? name : "cpu", {.threads = 2});
}

}  // namespace gyre::test
