#include "cpu/machine.h"

#include <fstream>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/machine.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gyre::cpu::HWY_NAMESPACE {

const char* TargetText() { return hwy::TargetName(HWY_TARGET); }

}  // namespace gyre::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre::cpu {

HWY_EXPORT(TargetText);

std::string simd_name() { return HWY_DYNAMIC_DISPATCH(TargetText)(); }

std::string processor_name() {
  // x86 spells the name out; Arm gives numbers only.
  std::ifstream info("/proc/cpuinfo");
  std::string part;
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.starts_with("model name")) return line.substr(colon + 2);
    if (line.starts_with("CPU part") && part.empty()) part = line.substr(colon + 2);
  }
#if defined(__aarch64__)
  return part.empty() ? "aarch64" : "aarch64 part " + part;
#else
  return "x86-64";
#endif
}

}  // namespace gyre::cpu
#endif
