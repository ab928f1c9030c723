#include <algorithm>
#include <utility>

#include "exchange.h"

namespace gyre::python {
namespace {

struct NumpyType {
  std::string_view typestr;
  DType dtype;
};
constexpr NumpyType kNumpyTypes[] = {{"<f4", DType::f32}, {"<f2", DType::f16}, {"|u1", DType::u8},
                                     {"<i4", DType::i32}, {"<u4", DType::u32}, {"<i8", DType::i64}};

DType numpy_dtype(nb::handle array, std::string_view typestr, const std::string& what) {
  for (const NumpyType& type : kNumpyTypes) {
    if (type.typestr == typestr) return type.dtype;
  }
  // NumPy has no bfloat16 of its own; ml_dtypes adds one, which the interface shows as raw bytes.
  const auto name = nb::cast<std::string>(nb::str(nb::object(array.attr("dtype"))));
  if (name == "bfloat16") return DType::bf16;
  refuse(what, ": dtype ", name,
         " is not one of float32, float16, bfloat16, uint8, int32, uint32, int64");
}

// What numpy.asarray() makes an array of, without a copy. The array keeps it, and it the tensor.
struct HostView {
  BoundTensor bound;
  std::string typestr;
};

nb::dict array_interface(const HostView& view) {
  const Tensor& tensor = view.bound.tensor;
  nb::list strides;
  for (const uint64_t stride : tensor.strides())
    strides.append(stride * size_bytes(tensor.dtype()));
  nb::dict interface;
  interface["version"] = 3;
  interface["shape"] = tuple_of(tensor.shape());
  interface["typestr"] = view.typestr;
  interface["strides"] = nb::tuple(strides);
  // NumPy refuses a null address, which an empty tensor may have.
  static std::byte nothing{};
  const uint64_t address =
      tensor.elements() != 0 ? tensor.address() : reinterpret_cast<uintptr_t>(&nothing);
  interface["data"] = nb::make_tuple(address, tensor.is_read_only());
  return interface;
}

}  // namespace

// Others, NumPy's scalars among them, have the interface too, but for memory that may be gone
// already.
bool is_numpy(nb::handle source) {
  if (!nb::hasattr(source, "__array_interface__")) return false;
  const auto modules = nb::borrow<nb::dict>(PyImport_GetModuleDict());
  const nb::object numpy = modules.get("numpy", nb::none());
  return !numpy.is_none() && nb::isinstance(source, numpy.attr("ndarray"));
}

BoundTensor from_numpy(nb::handle source, const std::optional<Device>& device,
                       const std::string& what) {
  release_pending();
  if (!is_numpy(source)) {
    const std::string message =
        what + ": needs a NumPy array, got " + nb::inst_name(source).c_str();
    throw nb::type_error(message.c_str());
  }
  const Device home = device.has_value() ? *device : device_of("cpu");
  if (home.info().name != "cpu")
    refuse(what, ": the memory is on cpu, it is needed on ", home.info().name,
           "; copy it with Tensor.write_from");
  const nb::dict interface(source.attr("__array_interface__"));
  Foreign foreign;
  foreign.dtype =
      numpy_dtype(source, nb::cast<std::string>(nb::handle(interface["typestr"])), what);
  foreign.shape = nb::cast<std::vector<int64_t>>(nb::handle(interface["shape"]));
  const auto [address, read_only] =
      nb::cast<std::pair<uintptr_t, bool>>(nb::handle(interface["data"]));
  foreign.data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  foreign.read_only = read_only;
  const nb::object strides = interface.get("strides", nb::none());
  if (!strides.is_none()) {
    const auto unit = static_cast<int64_t>(size_bytes(foreign.dtype));
    foreign.strides = nb::cast<std::vector<int64_t>>(strides);
    for (int64_t& stride : foreign.strides) {
      if (stride % unit != 0)
        refuse(what, ": a stride of ", stride, " bytes is no multiple of ", unit,
               ", the size of an element");
      stride /= unit;
    }
  }
  return {home, wrap(home, foreign, hold(nb::borrow(source)), what)};
}

nb::object to_numpy(nb::handle self) {
  const auto& bound = nb::cast<const BoundTensor&>(self);
  const DType dtype = bound.tensor.dtype();
  if (bound.device.info().name != "cpu")
    refuse("tensor.numpy: the memory is on ", bound.device.info().name,
           ", NumPy has the host's only; copy it with read_to");
  const nb::object asarray = nb::module_::import_("numpy").attr("asarray");
  if (dtype == DType::bf16) {
    nb::object bfloat16;
    try {
      bfloat16 = nb::module_::import_("ml_dtypes").attr("bfloat16");
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_ImportError)) throw;
      refuse("tensor.numpy: NumPy has no bf16; install ml_dtypes, or use torch.from_dlpack");
    }
    return asarray(HostView{bound, "<u2"}).attr("view")(bfloat16);
  }
  const auto* const type =
      std::find_if(std::begin(kNumpyTypes), std::end(kNumpyTypes),
                   [&](const NumpyType& candidate) { return candidate.dtype == dtype; });
  return asarray(HostView{bound, std::string(type->typestr)});
}

void bind_numpy(nb::module_& module) {
  nb::class_<HostView>(module, "_HostView").def_prop_ro("__array_interface__", array_interface);
}

}  // namespace gyre::python
