#include "cuda/device_list.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "cuda/context.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/nvrtc.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr uint32_t kOldestArch = 80;  // asynchronous copies to shared memory, bf16

int device_count(const Driver& api) {
  int count = 0;
  if (!api.reason.empty() || api.device_count(&count) != kCuSuccess) return 0;
  return count;
}

std::string no_devices(const Driver& api) {
  return api.reason.empty() ? "the NVIDIA driver sees no GPU" : api.reason;
}

std::string text_of(const Driver& api, CuDevice device, const CudaLimits& limits) {
  std::array<char, 256> name{};
  api.device_name(name.data(), static_cast<int>(name.size() - 1), device);
  const auto get = [&](CuDeviceAttribute which) {
    return static_cast<uint64_t>(attribute(api, device, which));
  };
  // Two transfers per clock; what a copy reaches is some ten percent less.
  const uint64_t gigabytes = 2 * get(kCuMemoryClockKhz) * get(kCuMemoryBusBits) / 8 / 1000000;
  std::string text =
      join(name.data(), ", compute capability ", limits.arch / 10, ".", limits.arch % 10, ", ",
           limits.multiprocessors, " multiprocessors, ", get(kCuL2Bytes) >> 20, " MiB L2");
  if (gigabytes != 0) text += join(", ", gigabytes, " GB/s at most");
  return text;
}

std::string reason_against(const Driver& api, uint32_t arch) {
  if (arch < kOldestArch) {
    return join("compute capability ", arch / 10, ".", arch % 10, "; Gyre needs ", kOldestArch / 10,
                ".", kOldestArch % 10);
  }
  const Nvrtc& compiler = nvrtc(api.version);
  if (!compiler.reason.empty()) return compiler.reason;
  if (arch <= compiler.newest_arch) return "";
  return join("NVRTC ", compiler.version_text(), " is older than this GPU (sm_", arch, ")");
}

}  // namespace

DeviceInfo describe_device(int ordinal) {
  const Driver& api = driver();
  DeviceInfo info;
  info.name = join("cuda:", ordinal);
  info.reason = api.reason;
  if (!info.reason.empty()) return info;
  CuDevice device = 0;
  if (const CuResult result = api.device_get(&device, ordinal); result != kCuSuccess) {
    info.reason = api.describe(result);
    return info;
  }
  const CudaLimits limits = limits_of(api, device);
  size_t bytes = 0;
  api.device_memory(&bytes, device);
  info.memory_bytes = bytes;
  info.compute_units = limits.multiprocessors;
  info.description = text_of(api, device, limits);
  info.reason = reason_against(api, limits.arch);
  info.available = info.reason.empty();
  return info;
}

int checked_ordinal(std::string_view name) {
  constexpr std::string_view kKind = "cuda", kPrefix = "cuda:";
  int ordinal = 0;
  if (name != kKind) {
    const std::string_view digits = name.substr(std::min(name.size(), kPrefix.size()));
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), ordinal);
    require(error == std::errc() && end == digits.end() && ordinal >= 0,
            "device.open: CUDA's devices are called \"cuda:0\", \"cuda:1\" and so on, got \"", name,
            "\"");
  }
  const Driver& api = driver();
  const int count = device_count(api);
  if (count == 0) fail(ErrorCode::unsupported, "device.open: ", name, ": ", no_devices(api));
  if (ordinal >= count)
    fail(ErrorCode::unsupported, "device.open: ", name, ": there are ", count, " CUDA devices");
  return ordinal;
}

std::vector<DeviceInfo> list_devices() {
  const Driver& api = driver();
  const int count = device_count(api);
  std::vector<DeviceInfo> all;
  all.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) all.push_back(describe_device(i));
  if (all.empty()) {
    DeviceInfo none;
    none.name = "cuda";
    none.reason = no_devices(api);
    all.push_back(none);
  }
  return all;
}

}  // namespace gyre::cuda
