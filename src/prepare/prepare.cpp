#include "gyre/prepare.h"

#include <algorithm>
#include <memory>

#include "gyre/device.h"
#include "prepare/record_model.h"
#include "runtime/dry_device.h"
#include "runtime/require.h"

namespace gyre {

std::vector<PreparedKernel> prepare(const Device& device, const ModelShape& shape,
                                    const PrepareCallback& progress) try {
  require(impl_of(device) != nullptr, "prepare: the device was moved from");
  DeviceImpl& impl = *impl_of(device);
  impl.require_same_process("prepare");
  std::vector<KernelKey> keys;
  for (const std::shared_ptr<const DeviceImpl>& target : impl.stands_for()) {
    const auto dry = std::make_shared<DryDevice>(target);
    record_model(device_of(dry), shape);
    for (const KernelKey& key : dry->needed()) {
      if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
    }
  }
  std::vector<PreparedKernel> made;
  impl.build(keys, [&](const BuiltKernel& built) {
    made.push_back({built.name, built.compiled, built.seconds});
    if (progress) progress({built.done, built.all, made.back()});
  });
  return made;
} catch (const std::bad_alloc&) {
  out_of_memory("prepare");
}

}  // namespace gyre
