// The composition root: the one file that knows the ops and every backend, and hands the ops' table
// of kernels to the device it opens. It lies beside the layers because it belongs to none of them:
// nothing in src/ includes it or needs its symbols.
#include "cpu/device.h"
#include "cuda/device.h"
#include "gyre/device.h"
#include "metal/device.h"
#include "ops/table.h"
#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre {
namespace {

struct Backend {
  std::string_view name;
  std::vector<DeviceInfo> (*list)();
  std::shared_ptr<DeviceImpl> (*open)(std::string_view name, const DeviceOptions&,
                                      std::span<const KernelUse>);
};

// The one list of backends; a new one is a row here.
constexpr Backend kBackends[] = {
    {"cpu", cpu::list_devices, cpu::open_device},
    {"cuda", cuda::list_devices, cuda::open_device},
    {"metal", metal::list_devices, metal::open_device},
};

}  // namespace

std::vector<DeviceInfo> devices() try {
  std::vector<DeviceInfo> all;
  for (const Backend& backend : kBackends) {
    for (DeviceInfo& info : backend.list()) all.push_back(std::move(info));
  }
  return all;
} catch (const std::bad_alloc&) {
  out_of_memory("devices");
}

Device Device::open(std::string_view name, const DeviceOptions& options) try {
  const std::string_view kind = name.substr(0, name.find(':'));
  for (const Backend& backend : kBackends) {
    if (backend.name != kind) continue;
    return device_of(backend.open(name, options, kernel_uses()));
  }
  fail(ErrorCode::invalid_argument, "device.open: no backend is called \"", name,
       "\"; known are cpu, cuda:N, cuda:sm_NN (to prepare), metal");
} catch (const std::bad_alloc&) {
  out_of_memory("device.open");
}

}  // namespace gyre
