#include <atomic>
#include <utility>

#include "cpu/device.h"
#include "cuda/device.h"
#include "gyre/device.h"
#include "gyre/ops.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

struct Backend {
  std::string_view name;
  std::vector<DeviceInfo> (*list)();
  std::shared_ptr<DeviceImpl> (*open)(std::string_view name, const DeviceOptions&);
};

std::vector<DeviceInfo> absent(std::string_view name, std::string_view reason) {
  DeviceInfo info;
  info.name = name;
  info.reason = reason;
  return {info};
}

constexpr std::string_view kNoMetal = "this build of Gyre has no Metal backend";

// The one list of backends; a new one is a row here.
constexpr Backend kBackends[] = {
    {"cpu", cpu::list_devices, cpu::open_device},
    {"cuda", cuda::list_devices, cuda::open_device},
    {"metal", [] { return absent("metal", kNoMetal); }, nullptr},
};

const DeviceImpl& checked(const std::shared_ptr<DeviceImpl>& impl) {
  require(impl != nullptr, "device: the handle was moved from");
  return *impl;
}

DeviceImpl& checked_mutable(const std::shared_ptr<DeviceImpl>& impl) {
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

DeviceImpl::DeviceImpl() {
  static std::atomic<uint64_t> next{1};
  id_ = next.fetch_add(1, std::memory_order_relaxed);
}

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> all;
  for (const Backend& backend : kBackends) {
    for (DeviceInfo& info : backend.list()) all.push_back(std::move(info));
  }
  return all;
}

Device Device::open(std::string_view name, const DeviceOptions& options) {
  const std::string_view kind = name.substr(0, name.find(':'));
  for (const Backend& backend : kBackends) {
    if (backend.name != kind) continue;
    if (backend.open == nullptr) {
      fail(ErrorCode::unsupported, "device.open: ", name, ": ", backend.list().front().reason);
    }
    return Device(backend.open(name, options));
  }
  fail(ErrorCode::invalid_argument, "device.open: no backend is called \"", name,
       "\"; known are cpu, cuda:N, metal");
}

const DeviceInfo& Device::info() const { return checked(impl_).info(); }
MemoryUse Device::memory() const { return checked(impl_).memory(); }
void Device::trim() const { checked_mutable(impl_).trim(); }
void Device::wait() const { checked_mutable(impl_).wait(); }
uint64_t Device::stream() const { return checked(impl_).stream(); }
void Device::start_trace() const { checked_mutable(impl_).trace().start(); }
Trace Device::stop_trace() const { return checked_mutable(impl_).trace().stop(); }

Tensor Device::tensor(DType dtype, const Dims& shape) const {
  DeviceImpl& impl = checked_mutable(impl_);
  require(size_bytes(dtype) != 0, "device.tensor: ", static_cast<uint32_t>(dtype),
          " is not a dtype");
  const uint64_t bytes = checked_bytes("device.tensor", dtype, shape);
  return {impl.allocate(bytes), dtype, shape, contiguous_strides(shape)};
}

Tensor Device::wrap(void* data, DType dtype, const Dims& shape, const Dims& strides,
                    std::shared_ptr<void> owner) const {
  const View view = checked_view(dtype, shape, strides, data);
  const Storage::Block block{reinterpret_cast<uintptr_t>(data), view.bytes, data, false};
  return {checked_mutable(impl_).wrap(block, std::move(owner)), dtype, shape, view.strides};
}

Tensor Device::wrap(const void* data, DType dtype, const Dims& shape, const Dims& strides,
                    std::shared_ptr<void> owner) const {
  const View view = checked_view(dtype, shape, strides, data);
  const Storage::Block block{reinterpret_cast<uintptr_t>(data), view.bytes, const_cast<void*>(data),
                             true};
  return {checked_mutable(impl_).wrap(block, std::move(owner)), dtype, shape, view.strides};
}

std::vector<KernelDescription> Device::kernels() const {
  DeviceImpl& impl = checked_mutable(impl_);
  std::vector<KernelDescription> rows;
  for (const KernelInfo* kernel : all_kernels()) {
    KernelDescription row;
    row.name = kernel->name;
    row.params_bytes = kernel->params_bytes;
    row.variants = impl.variants(*kernel);
    row.loaded = impl.loaded_pipelines(*kernel);
    for (uint32_t i = 0; i < kernel->arg_count; ++i) {
      constexpr const char* kAccess[] = {" read", " write", " read+write"};
      row.args += join(i == 0 ? "" : ", ", kernel->args[i].name,
                       kAccess[static_cast<size_t>(kernel->args[i].access)]);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace gyre
