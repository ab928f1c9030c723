#pragma once

#include <cstdlib>

#include "gyre/device.h"

namespace gyre::test {

// The CPU, unless GYRE_TEST_DEVICE names another.
inline Device test_device() {
  const char* const name = std::getenv("GYRE_TEST_DEVICE");
  return Device::open(name != nullptr ? name : "cpu", {.threads = 2});
}

}  // namespace gyre::test
