#pragma once

#include "bound.h"

namespace gyre::python {

// Whether Gyre's stream waits for what the producer of memory has queued.
enum class Order : uint8_t { wait, none };

// Shares the memory of anything with __dlpack__, or of a capsule. `device`: where it must be; none:
// the device everybody shares. `what` begins the messages.
BoundTensor from_dlpack(nb::handle source, const std::optional<Device>& device,
                        const std::string& what, Order order = Order::wait);
bool is_numpy(nb::handle source);  // an array of NumPy's
// As from_dlpack, for NumPy arrays, bfloat16 of ml_dtypes included.
BoundTensor from_numpy(nb::handle source, const std::optional<Device>& device,
                       const std::string& what);
// Whichever of the two fits; a gyre.Tensor as it is.
BoundTensor as_tensor(nb::handle source, const std::optional<Device>& device,
                      const std::string& what);

nb::object to_dlpack(const BoundTensor& bound, bool versioned);  // a capsule
nb::tuple dlpack_device(const BoundTensor& bound);
nb::object to_numpy(nb::handle self);  // of a gyre.Tensor
void bind_numpy(nb::module_& module);

// Memory that others own: where it is and how it lies. Strides count elements and may be negative
// here, which is refused.
struct Foreign {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // empty: contiguous
  bool read_only = false;
  OwnerRelease release = OwnerRelease::when_done;
};

Tensor wrap(const Device& device, const Foreign& foreign, std::shared_ptr<void> owner,
            const std::string& what);

}  // namespace gyre::python
