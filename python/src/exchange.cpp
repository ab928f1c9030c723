#include "exchange.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "dlpack.h"

namespace gyre::python {
namespace {

constexpr const char* kCapsule = "dltensor";
constexpr const char* kCapsuleVersioned = "dltensor_versioned";
constexpr const char* kUsed = "used_dltensor";
constexpr const char* kUsedVersioned = "used_dltensor_versioned";

// "cpu", "cuda:1"; what Gyre has no device for is refused by its number.
std::string device_name(const DLDevice& device, const std::string& what) {
  if (device.device_type == kDLCPU || device.device_type == kDLCUDAHost) return "cpu";
  if (device.device_type == kDLCUDA) return "cuda:" + std::to_string(device.device_id);
  refuse(what, ": memory of DLPack device type ", device.device_type,
         "; Gyre shares memory of the CPU (1), pinned (3) and of CUDA (2)");
}

Device place(const DLDevice& where, const std::optional<Device>& wanted, const std::string& what) {
  const std::string name = device_name(where, what);
  if (!wanted.has_value()) return device_of(name);
  const std::string& wanted_name = wanted->info().name;
  if (wanted_name != name)
    refuse(what, ": the memory is on ", name, ", it is needed on ", wanted_name,
           "; copy it there first");
  return *wanted;
}

DType dtype_of(const DLDataType& type, const std::string& what) {
  const auto is = [&](uint8_t code, uint8_t bits) {
    return type.code == code && type.bits == bits && type.lanes == 1;
  };
  if (is(kDLFloat, 32)) return DType::f32;
  if (is(kDLFloat, 16)) return DType::f16;
  if (is(kDLBfloat, 16)) return DType::bf16;
  if (is(kDLUInt, 8)) return DType::u8;
  if (is(kDLInt, 32)) return DType::i32;
  if (is(kDLUInt, 32)) return DType::u32;
  if (is(kDLInt, 64)) return DType::i64;
  const char* kind = "type code ";
  switch (type.code) {
    case kDLInt:
      kind = "int";
      break;
    case kDLUInt:
      kind = "uint";
      break;
    case kDLFloat:
      kind = "float";
      break;
    case kDLBool:
      refuse(what,
             ": dtype bool is not one of f32, f16, bf16, u8, i32, u32, i64; view it as uint8");
    default:
      refuse(what, ": DLPack type code ", static_cast<int>(type.code), " with ",
             static_cast<int>(type.bits), " bits is not one of f32, f16, bf16, u8, i32, u32, i64");
  }
  refuse(what, ": dtype ", kind, static_cast<int>(type.bits),
         type.lanes == 1 ? "" : "x" + std::to_string(type.lanes),
         " is not one of f32, f16, bf16, u8, i32, u32, i64");
}

DLDataType dl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {kDLFloat, 32, 1};
    case DType::f16:
      return {kDLFloat, 16, 1};
    case DType::bf16:
      return {kDLBfloat, 16, 1};
    case DType::u8:
      return {kDLUInt, 8, 1};
    case DType::i32:
      return {kDLInt, 32, 1};
    case DType::u32:
      return {kDLUInt, 32, 1};
    case DType::i64:
      return {kDLInt, 64, 1};
  }
  refuse("dlpack: not a dtype");
}

DLDevice dl_device(const Device& device) {
  const std::string& name = device.info().name;
  // Others take Metal memory by an object of Metal's, which Gyre does not hand out.
  if (name == "metal") refuse("dlpack: memory of metal is not shared; copy it with read_to");
  const size_t colon = name.find(':');
  if (colon == std::string::npos) return {kDLCPU, 0};
  int32_t ordinal = 0;
  std::from_chars(name.data() + colon + 1, name.data() + name.size(), ordinal);
  return {kDLCUDA, ordinal};
}

// Memory that is not ordered is used on its producer's own stream, in whose order it is freed.
Foreign describe(const DLTensor& tensor, bool read_only, Order order, const std::string& what) {
  Foreign foreign;
  foreign.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  foreign.dtype = dtype_of(tensor.dtype, what);
  foreign.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  if (tensor.strides != nullptr)
    foreign.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  foreign.read_only = read_only;
  if (order == Order::none) foreign.release = OwnerRelease::in_stream_order;
  return foreign;
}

template <class Managed>
void release(void* held) {
  auto* const managed = static_cast<Managed*>(held);
  if (managed->deleter != nullptr) managed->deleter(managed);
}

// From here on the memory is ours to give back, whatever happens.
template <class Managed>
std::shared_ptr<void> take(nb::handle capsule, const char* name, const char* used) {
  void* const managed = PyCapsule_GetPointer(capsule.ptr(), name);
  if (managed == nullptr) throw nb::python_error();
  if (PyCapsule_SetName(capsule.ptr(), used) != 0) throw nb::python_error();
  return hold(managed, release<Managed>);
}

// `owner` holds a DLManagedTensorVersioned.
BoundTensor adopt(std::shared_ptr<void> owner, const std::optional<Device>& device,
                  const std::string& what, Order order) {
  const auto& managed = *static_cast<const DLManagedTensorVersioned*>(owner.get());
  if (managed.version.major != kDLMajor)
    refuse(what, ": DLPack version ", managed.version.major, ".", managed.version.minor,
           "; version ", kDLMajor, " is understood");
  const DLTensor& tensor = managed.dl_tensor;
  const Device home = place(tensor.device, device, what);
  const bool read_only = (managed.flags & kDLFlagReadOnly) != 0;
  const Foreign foreign = describe(tensor, read_only, order, what);
  return {home, wrap(home, foreign, std::move(owner), what)};
}

BoundTensor consume(nb::handle capsule, const std::optional<Device>& device,
                    const std::string& what, Order order) {
  if (PyCapsule_IsValid(capsule.ptr(), kCapsuleVersioned) != 0)
    return adopt(take<DLManagedTensorVersioned>(capsule, kCapsuleVersioned, kUsedVersioned), device,
                 what, order);
  if (PyCapsule_IsValid(capsule.ptr(), kCapsule) != 0) {
    const auto owner = take<DLManagedTensor>(capsule, kCapsule, kUsed);
    const DLTensor& tensor = static_cast<const DLManagedTensor*>(owner.get())->dl_tensor;
    const Device home = place(tensor.device, device, what);
    return {home, wrap(home, describe(tensor, false, order, what), owner, what)};
  }
  const char* const name = PyCapsule_GetName(capsule.ptr());
  PyErr_Clear();
  const std::string_view given = name != nullptr ? name : "";
  if (given == kUsed || given == kUsedVersioned)
    refuse(what, ": the capsule was consumed before; a capsule can be used once");
  refuse(what, ": a capsule called \"", given, "\" is not a DLPack tensor");
}

// The producer's C functions, or null. Types are kept alive; a few are enough.
const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  constexpr size_t kMaxTypes = 16;
  static std::vector<std::pair<PyTypeObject*, const DLPackExchangeAPI*>> known;
  for (const auto& [one, api] : known) {
    if (one == type) return api;
  }
  const DLPackExchangeAPI* api = nullptr;
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), kDLExchangeAttribute, nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kDLExchangeCapsule) != 0) {
    api = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule.ptr(), kDLExchangeCapsule));
    while (api != nullptr && api->header.version.major != kDLMajor)
      api = reinterpret_cast<const DLPackExchangeAPI*>(api->header.prev_api);
  }
  if (known.size() < kMaxTypes) {
    Py_INCREF(type);
    known.emplace_back(type, api);
  }
  return api;
}

// Through C functions of the producer: a tenth of the time, and no stream waits for another. Of a
// CUDA device that suits Order::none alone.
std::optional<BoundTensor> exchange(nb::handle source, const std::optional<Device>& device,
                                    const std::string& what, Order order) {
  if (order == Order::wait && (!device.has_value() || device->stream() != 0)) return std::nullopt;
  const DLPackExchangeAPI* const api = exchange_api(Py_TYPE(source.ptr()));
  if (api == nullptr) return std::nullopt;
  // __dlpack__ refuses gradients, and says more clearly what else cannot be shared.
  if (nb::object(nb::getattr(source, "requires_grad", nb::none())).is(Py_True)) return std::nullopt;
  DLManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_py_object_no_sync(source.ptr(), &managed) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return adopt(hold(managed, release<DLManagedTensorVersioned>), device, what, order);
}

// Types of producers from before DLPack 1.0, which raise TypeError for max_version: asking them in
// vain each time costs more than all the rest. Kept alive; a few are enough.
std::vector<PyTypeObject*>& old_producers() {
  static std::vector<PyTypeObject*> types;
  return types;
}

// stream: 0 for memory that has none; -1: nobody waits.
nb::object ask(nb::handle source, int64_t stream) {
  constexpr size_t kMaxTypes = 16;
  std::vector<PyTypeObject*>& old = old_producers();
  PyTypeObject* const type = Py_TYPE(source.ptr());
  const nb::object method = source.attr("__dlpack__");
  nb::dict arguments;
  if (stream != 0) arguments["stream"] = stream;
  const bool known = std::find(old.begin(), old.end(), type) != old.end();
  if (!known) {
    auto versioned = nb::borrow<nb::dict>(arguments.attr("copy")());
    versioned["max_version"] = nb::make_tuple(kDLMajor, kDLMinor);
    try {
      return method(**versioned);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
  }
  nb::object capsule = method(**arguments);
  if (!known && old.size() < kMaxTypes) {
    Py_INCREF(type);
    old.push_back(type);
  }
  return capsule;
}

}  // namespace

Tensor wrap(const Device& device, const Foreign& foreign, std::shared_ptr<void> owner,
            const std::string& what) {
  const size_t rank = foreign.shape.size();
  if (rank > kMaxRank) refuse(what, ": at most ", kMaxRank, " dimensions, got ", rank);
  const bool empty =
      std::find(foreign.shape.begin(), foreign.shape.end(), 0) != foreign.shape.end();
  std::array<uint64_t, kMaxRank> shape{}, strides{};
  for (size_t d = 0; d < rank; ++d) {
    const int64_t count = foreign.shape[d];
    if (count < 0) refuse(what, ": dimension ", d, " has ", count, " entries");
    shape[d] = static_cast<uint64_t>(count);
    if (foreign.strides.empty()) continue;
    const int64_t stride = foreign.strides[d];
    if (stride < 0 && count > 1 && !empty)
      refuse(what, ": dimension ", d, " has stride ", stride,
             "; negative strides are not taken, copy the array");
    strides[d] = static_cast<uint64_t>(std::max<int64_t>(stride, 0));
  }
  const Dims shape_dims(std::span(shape.data(), rank));
  // Without elements strides mean nothing, and some libraries leave nonsense there.
  const Dims stride_dims =
      foreign.strides.empty() || empty ? Dims() : Dims(std::span(strides.data(), rank));
  void* const data = empty ? nullptr : foreign.data;
  try {
    if (foreign.read_only)
      return device.wrap(static_cast<const void*>(data), foreign.dtype, shape_dims, stride_dims,
                         std::move(owner), foreign.release);
    return device.wrap(data, foreign.dtype, shape_dims, stride_dims, std::move(owner),
                       foreign.release);
  } catch (const Error& error) {
    throw Error(error.code(), what + ": " + error.what());
  }
}

BoundTensor from_dlpack(nb::handle source, const std::optional<Device>& device,
                        const std::string& what, Order order) {
  release_pending();
  if (PyCapsule_CheckExact(source.ptr()) != 0) return consume(source, device, what, order);
  if (std::optional<BoundTensor> taken = exchange(source, device, what, order))
    return *std::move(taken);
  if (!nb::hasattr(source, "__dlpack__") || !nb::hasattr(source, "__dlpack_device__")) {
    const std::string message = what + ": needs a gyre.Tensor or an object with __dlpack__, got " +
                                nb::inst_name(source).c_str();
    throw nb::type_error(message.c_str());
  }
  const auto [type, id] =
      nb::cast<std::pair<int32_t, int32_t>>(nb::tuple(source.attr("__dlpack_device__")()));
  const Device home = place({type, id}, device, what);
  const auto stream = static_cast<int64_t>(home.stream());
  // The producer makes our stream wait for its own: no thread waits.
  return consume(ask(source, order == Order::none && stream != 0 ? -1 : stream), home, what, order);
}

BoundTensor as_tensor(nb::handle source, const std::optional<Device>& device,
                      const std::string& what) {
  if (nb::isinstance<BoundTensor>(source)) {
    const auto& bound = nb::cast<const BoundTensor&>(source);
    if (!device.has_value() || *device == bound.device) return bound;
    const DLDevice where = dl_device(bound.device);
    // Any memory of the host is good for every CPU device: their work is done when submit returns.
    // Two devices on one GPU have streams that know nothing of each other.
    if (where.device_type != kDLCPU)
      refuse(what, ": the tensor belongs to another ", bound.device.info().name,
             " device than the one that is to use it");
    place(where, device, what);
    const Tensor& tensor = bound.tensor;
    const Dims& shape = tensor.shape();
    const Dims& strides = tensor.strides();
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the address of host memory
    auto* const data = reinterpret_cast<void*>(static_cast<uintptr_t>(tensor.address()));
    const Foreign foreign{data,
                          tensor.dtype(),
                          {shape.begin(), shape.end()},
                          {strides.begin(), strides.end()},
                          tensor.is_read_only()};
    return {*device, wrap(*device, foreign, std::make_shared<Tensor>(tensor), what)};
  }
  if (is_numpy(source)) return from_numpy(source, device, what);
  return from_dlpack(source, device, what);
}

Written Operands::written(const char* name, const OptionalOperand& given, DType dtype,
                          const Dims& shape) const {
  if (given.has_value()) return {(*this)(name, *given), *given};
  Tensor made = device_.tensor(dtype, shape);
  return {made, {nb::cast(BoundTensor{device_, made})}};
}

std::optional<Written> Operands::written_like(const char* name, const OptionalOperand& given,
                                              const Tensor& source) const {
  if (!given.has_value() && !source.defined()) return std::nullopt;
  return written(name, given, source.dtype(), source.shape());
}

Tensor Operands::operator()(const char* name, const Operand& operand) const {
  return as_tensor(operand.object, device_, std::string(op_) + ": " + name).tensor;
}

namespace {

// What a capsule holds: the tensor lives as long as its consumer wants.
template <class Managed>
struct Exported {
  Managed managed{};
  Tensor tensor;
  std::array<int64_t, kMaxRank> shape{}, strides{};

  explicit Exported(const BoundTensor& bound) : tensor(bound.tensor) {
    for (uint32_t d = 0; d < tensor.rank(); ++d) {
      shape[d] = static_cast<int64_t>(tensor.shape(d));
      strides[d] = static_cast<int64_t>(tensor.stride(d));
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the address may be the device's
    managed.dl_tensor.data = reinterpret_cast<void*>(static_cast<uintptr_t>(tensor.address()));
    managed.dl_tensor.device = dl_device(bound.device);
    managed.dl_tensor.ndim = static_cast<int32_t>(tensor.rank());
    managed.dl_tensor.dtype = dl_type(tensor.dtype());
    managed.dl_tensor.shape = shape.data();
    managed.dl_tensor.strides = strides.data();
    managed.manager_ctx = this;
    managed.deleter = [](Managed* self) { delete static_cast<Exported*>(self->manager_ctx); };
  }
};

// A capsule that nobody consumed still owns its tensor.
template <class Managed>
nb::object make_capsule(Exported<Managed>* exported, const char* name) {
  PyObject* const capsule = PyCapsule_New(&exported->managed, name, [](PyObject* self) {
    const char* const called = PyCapsule_GetName(self);
    if (called == nullptr || std::string_view(called).starts_with("used")) return;
    release<Managed>(PyCapsule_GetPointer(self, called));
  });
  if (capsule == nullptr) {
    delete exported;
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

}  // namespace

nb::object to_dlpack(const BoundTensor& bound, bool versioned) {
  if (!versioned) return make_capsule(new Exported<DLManagedTensor>(bound), kCapsule);
  auto* const exported = new Exported<DLManagedTensorVersioned>(bound);
  exported->managed.version = {kDLMajor, kDLMinor};
  exported->managed.flags = bound.tensor.is_read_only() ? kDLFlagReadOnly : 0;
  return make_capsule(exported, kCapsuleVersioned);
}

nb::tuple dlpack_device(const BoundTensor& bound) {
  const DLDevice device = dl_device(bound.device);
  return nb::make_tuple(device.device_type, device.device_id);
}

}  // namespace gyre::python
