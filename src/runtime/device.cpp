#include "gyre/device.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

const DeviceImpl& checked(const std::shared_ptr<DeviceImpl>& impl) {
  require(impl != nullptr, "device: the handle was moved from");
  return *impl;
}

DeviceImpl& checked_mutable(const std::shared_ptr<DeviceImpl>& impl) {
  checked(impl).require_same_process("device");
  return const_cast<DeviceImpl&>(checked(impl));
}

struct View {
  Dims strides;
  uint64_t bytes = 0;
};

View checked_view(DType dtype, const Dims& shape, const Dims& strides, const void* data) {
  require(size_bytes(dtype) != 0, "device.wrap: ", static_cast<uint32_t>(dtype), " is not a dtype");
  View view;
  view.strides = strides.size() == 0 ? contiguous_strides(shape) : strides;
  checked_bytes("device.wrap", dtype, shape);
  const uint64_t extent = checked_extent("device.wrap", shape, view.strides);
  require(extent <= (uint64_t{1} << 62) / size_bytes(dtype), "device.wrap: shape ", shape,
          " with strides ", view.strides, " spans more than 2^62 bytes");
  view.bytes = extent * size_bytes(dtype);
  require(data != nullptr || view.bytes == 0, "device.wrap: the pointer is null for shape ", shape);
  require(view.bytes <= ~uint64_t{0} - reinterpret_cast<uintptr_t>(data), "device.wrap: shape ",
          shape, " with strides ", view.strides, " reaches past the end of memory from address ",
          data);
  require(reinterpret_cast<uintptr_t>(data) % size_bytes(dtype) == 0, "device.wrap: ", dtype,
          " data must be aligned to ", size_bytes(dtype), " bytes, got address ", data);
  return view;
}

}  // namespace

DeviceImpl::DeviceImpl(std::span<const KernelUse> uses) : uses_(uses), trace_(uses) {
  static std::atomic<uint64_t> next{1};
  id_ = next.fetch_add(1, std::memory_order_relaxed);
}

void DeviceImpl::require_same_process(const char* op) const {
  if (process_ == process_generation()) return;
  fail(ErrorCode::device_lost, op, ": device ", info().name,
       " was opened before fork(), its threads are the parent's; open one in the child");
}

std::shared_ptr<FenceState> DeviceImpl::submit_on(uint64_t /*stream*/,
                                                  const CommandList& /*list*/) {
  fail(ErrorCode::unsupported, "encoder.submit_on: device ", info().name, " has no streams");
}

const DeviceInfo& Device::info() const { return checked(impl_).info(); }
MemoryUse Device::memory() const { return checked_mutable(impl_).memory(); }
void Device::trim() const { checked_mutable(impl_).trim(); }
void Device::wait() const try { checked_mutable(impl_).wait(); } catch (const std::bad_alloc&) {
  out_of_memory("device.wait");
}
uint64_t Device::stream() const { return checked(impl_).stream(); }
void Device::start_trace() const { checked_mutable(impl_).trace().start(); }
Trace Device::stop_trace() const { return checked_mutable(impl_).trace().stop(); }

Tensor Device::tensor(DType dtype, const Dims& shape) const try {
  DeviceImpl& impl = checked_mutable(impl_);
  require(size_bytes(dtype) != 0, "device.tensor: ", static_cast<uint32_t>(dtype),
          " is not a dtype");
  const uint64_t bytes = checked_bytes("device.tensor", dtype, shape);
  return {impl.allocate(bytes), dtype, shape, contiguous_strides(shape)};
} catch (const std::bad_alloc&) {
  out_of_memory("device.tensor");
}

Tensor Device::wrap(void* data, DType dtype, const Dims& shape, const Dims& strides,
                    std::shared_ptr<void> owner, OwnerRelease release) const try {
  const View view = checked_view(dtype, shape, strides, data);
  const Storage::Block block{reinterpret_cast<uintptr_t>(data), view.bytes, data, false, release};
  return {checked_mutable(impl_).wrap(block, std::move(owner)), dtype, shape, view.strides};
} catch (const std::bad_alloc&) {
  out_of_memory("device.wrap");
}

Tensor Device::wrap(const void* data, DType dtype, const Dims& shape, const Dims& strides,
                    std::shared_ptr<void> owner, OwnerRelease release) const try {
  const View view = checked_view(dtype, shape, strides, data);
  const Storage::Block block{reinterpret_cast<uintptr_t>(data), view.bytes, const_cast<void*>(data),
                             true, release};
  return {checked_mutable(impl_).wrap(block, std::move(owner)), dtype, shape, view.strides};
} catch (const std::bad_alloc&) {
  out_of_memory("device.wrap");
}

std::vector<KernelDescription> Device::kernels() const try {
  const DeviceImpl& impl = checked_mutable(impl_);
  std::vector<KernelDescription> rows;
  for (const KernelUse& use : impl.kernel_uses()) {
    const KernelInfo& kernel = *use.kernel;
    const std::span<const uint64_t> specs = impl.specs(use);
    KernelDescription row;
    row.name = kernel.name;
    row.params_bytes = kernel.params_bytes;
    row.variants = static_cast<uint32_t>(std::count_if(
        specs.begin(), specs.end(), [&](uint64_t spec) { return impl.has(kernel, spec); }));
    row.loaded = impl.loaded_pipelines(kernel);
    for (uint32_t i = 0; i < kernel.arg_count; ++i) {
      constexpr const char* kAccess[] = {" read", " write", " read+write"};
      row.args += join(i == 0 ? "" : ", ", kernel.args[i].name,
                       kAccess[static_cast<size_t>(kernel.args[i].access)]);
    }
    rows.push_back(std::move(row));
  }
  return rows;
} catch (const std::bad_alloc&) {
  out_of_memory("device.kernels");
}

}  // namespace gyre
