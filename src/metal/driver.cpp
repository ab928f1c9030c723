#include "metal/driver.h"

#include <atomic>

namespace gyre::metal {
namespace {

constinit std::atomic<const Driver*> test_driver{nullptr};

const Driver* system_driver() {
#if defined(GYRE_HAVE_METAL)
  return apple_driver();
#else
  return nullptr;
#endif
}

constexpr const char* no_driver() {
#if defined(__APPLE__)
  return "this build of Gyre has no Metal backend: configure it with "
         "-DGYRE_METAL_CPP=<folder of metal-cpp> (docs/metal.md)";
#else
  return "no Apple GPU: this system has no Metal";
#endif
}

}  // namespace

const Driver* driver() {
  const Driver* const of_test = test_driver.load(std::memory_order_acquire);
  return of_test != nullptr ? of_test : system_driver();
}

std::string absent_reason() {
  const Driver* const api = driver();
  return api != nullptr ? api->reason() : no_driver();
}

void set_driver_for_test(const Driver* driver) {
  test_driver.store(driver, std::memory_order_release);
}

}  // namespace gyre::metal
