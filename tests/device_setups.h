#pragma once

#include <ostream>

#include "gyre_test.h"

namespace gyre::test {

// One way to run a test: a device; on the CPU also an instruction set and a number of threads.
struct DeviceSetup {
  std::string name;     // also a test name: letters, digits and underscores
  std::string device;   // for Device::open
  uint32_t number = 0;  // among the setups of the device
  uint32_t threads = 0;
  int64_t simd_target = 0;  // Highway's number; 0 leaves the choice to the library
  std::string simd_name;
};

inline std::ostream& operator<<(std::ostream& out, const DeviceSetup& setup) {
  return out << setup.name;
}

// Every available device, the CPU on each instruction set that the build and the processor share.
std::vector<DeviceSetup> device_setups();

// Opens the setup's device. The instruction set is in force while the object lives, because kernels
// are chosen when they are first used.
class OpenDevice {
 public:
  explicit OpenDevice(const DeviceSetup& setup);
  OpenDevice(const OpenDevice&) = delete;
  OpenDevice& operator=(const OpenDevice&) = delete;
  ~OpenDevice();

  const Device& device() const { return device_; }

 private:
  Device device_;
};

}  // namespace gyre::test
