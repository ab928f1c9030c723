#include "device_setups.h"

#if !defined(HWY_COMPILE_ONLY_STATIC)
#include <hwy/targets.h>
#endif

namespace gyre::test {
namespace {

struct SimdTarget {
  int64_t target;
  std::string name;
};

#if defined(HWY_COMPILE_ONLY_STATIC)
std::vector<SimdTarget> simd_targets() { return {{0, "static"}}; }
void use_simd_target(int64_t /*target*/) {}
#else
std::vector<SimdTarget> simd_targets() {
  std::vector<SimdTarget> targets;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets())
    targets.push_back({target, hwy::TargetName(target)});
  return targets;
}
void use_simd_target(int64_t target) { hwy::SetSupportedTargetsForTest(target); }
#endif

Device open_with_target(const DeviceSetup& setup) {
  use_simd_target(setup.simd_target);
  return Device::open(setup.device, {.threads = setup.threads});
}

}  // namespace

std::vector<DeviceSetup> device_setups() {
  std::vector<DeviceSetup> all;
  for (const DeviceInfo& info : devices()) {
    if (!info.available) continue;
    if (info.name != "cpu") {
      DeviceSetup setup;
      setup.device = info.name;
      for (const char c : info.name) setup.name += c == ':' ? '_' : c;
      all.push_back(setup);
      continue;
    }
    uint32_t number = 0;
    for (const SimdTarget& simd : simd_targets()) {
      for (const uint32_t threads : {1u, 2u, 3u}) {
        all.push_back({.name = "cpu_" + simd.name + "_" + std::to_string(threads) + "_threads",
                       .device = "cpu",
                       .number = number++,
                       .threads = threads,
                       .simd_target = simd.target,
                       .simd_name = simd.name});
      }
    }
  }
  return all;
}

OpenDevice::OpenDevice(const DeviceSetup& setup) : device_(open_with_target(setup)) {}
OpenDevice::~OpenDevice() { use_simd_target(0); }

}  // namespace gyre::test
