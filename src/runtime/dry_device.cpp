#include "runtime/dry_device.h"

#include "runtime/require.h"

namespace gyre {
namespace {

class DryStorage final : public Storage {
 public:
  using Storage::Storage;
  void write(uint64_t /*offset*/, const void* /*from*/, uint64_t /*bytes*/) const override {}
};

}  // namespace

std::shared_ptr<Storage> DryDevice::allocate(uint64_t bytes) {
  constexpr uint64_t kAlignment = 256, kMax = uint64_t{1} << 62;  // as a GPU's blocks are
  if (bytes > kMax - next_address_)
    fail(ErrorCode::out_of_memory, "device.tensor: ", bytes, " bytes and all before reach past ",
         "2^62");
  const Storage::Block block{next_address_, bytes, nullptr, false};
  next_address_ += (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  return std::make_shared<DryStorage>(id(), block);
}

std::shared_ptr<Storage> DryDevice::wrap(const Storage::Block& /*block*/,
                                         std::shared_ptr<void> /*owner*/) {
  fail(ErrorCode::unsupported, "device.wrap: nothing runs on this device");
}

std::shared_ptr<const Pipeline> DryDevice::pipeline(const KernelInfo& kernel, uint64_t spec) {
  return pipelines_.find_or_make(kernel, spec, [&]() -> std::unique_ptr<Pipeline> {
    if (!target_->has(kernel, spec)) return nullptr;
    needed_.push_back({&kernel, spec});
    return std::make_unique<Pipeline>(kernel, spec);
  });
}

std::unique_ptr<GraphImpl> DryDevice::instantiate(CommandList /*list*/) {
  fail(ErrorCode::unsupported, "encoder.instantiate: nothing runs on this device");
}

}  // namespace gyre
