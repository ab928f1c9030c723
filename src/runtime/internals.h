#pragma once
// The library reaches into the public handles through here; their users cannot.

#include <memory>
#include <utility>

#include "gyre/encoder.h"

namespace gyre {

struct Internals {
  static const std::shared_ptr<DeviceImpl>& impl(const Device& device) { return device.impl_; }
  static Device device(std::shared_ptr<DeviceImpl> impl) { return Device(std::move(impl)); }
  static Recorder& recorder(const Encoder& encoder) { return encoder.recorder(); }
  static const std::shared_ptr<Storage>& storage(const Tensor& tensor) { return tensor.storage_; }
  template <class Handle>
  static auto& state(const Handle& handle) {
    return handle.state();
  }
  static Fence fence(std::shared_ptr<FenceState> state) { return Fence(std::move(state)); }
};

inline const std::shared_ptr<DeviceImpl>& impl_of(const Device& device) {
  return Internals::impl(device);
}
// A device that Device::open() does not know.
inline Device device_of(std::shared_ptr<DeviceImpl> impl) {
  return Internals::device(std::move(impl));
}
inline Recorder& recorder_of(const Encoder& encoder) { return Internals::recorder(encoder); }
inline const std::shared_ptr<Storage>& storage_of(const Tensor& tensor) {
  return Internals::storage(tensor);
}

}  // namespace gyre
