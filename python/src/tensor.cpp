#include "exchange.h"

namespace gyre::python {
namespace {

std::string repr(const BoundTensor& bound) {
  std::ostringstream text = plain_text();
  text << "gyre.Tensor(shape=" << bound.tensor.shape() << ", dtype=" << name(bound.tensor.dtype())
       << ", device=" << bound.device.info().name << ")";
  return text.str();
}

BoundTensor view_of(const BoundTensor& bound, Tensor tensor) {
  return {bound.device, std::move(tensor)};
}

// Basic indexing as NumPy has it: numbers, slices with a positive step, and one ellipsis.
BoundTensor index(const BoundTensor& bound, nb::handle key) {
  const Tensor& tensor = bound.tensor;
  const nb::tuple keys =
      nb::isinstance<nb::tuple>(key) ? nb::borrow<nb::tuple>(key) : nb::make_tuple(nb::borrow(key));
  size_t named = 0, ellipses = 0;
  for (const nb::handle one : keys) ++(one.is(Py_Ellipsis) ? ellipses : named);
  if (ellipses > 1) refuse("tensor: an index may have one ellipsis, got ", ellipses);
  if (named > tensor.rank())
    refuse("tensor: ", named, " indices for a tensor of rank ", tensor.rank());
  Sizes shape, strides;
  uint64_t offset = 0;
  uint32_t dim = 0;
  const auto keep = [&] {
    shape.push_back(tensor.shape(dim));
    strides.push_back(tensor.stride(dim));
    ++dim;
  };
  for (const nb::handle one : keys) {
    if (one.is(Py_Ellipsis)) {
      for (size_t skipped = tensor.rank() - named; skipped != 0; --skipped) keep();
      continue;
    }
    const auto count = static_cast<Py_ssize_t>(tensor.shape(dim));
    if (nb::isinstance<nb::slice>(one)) {
      const auto [begin, end, step, length] =
          nb::borrow<nb::slice>(one).compute(static_cast<size_t>(count));
      if (step < 1) refuse("tensor: a slice's step must be at least 1, got ", step);
      if (length != 0) offset += static_cast<uint64_t>(begin) * tensor.stride(dim);
      shape.push_back(length);
      strides.push_back(tensor.stride(dim) * static_cast<uint64_t>(step));
    } else {
      Py_ssize_t at = 0;
      if (!nb::try_cast<Py_ssize_t>(one, at))
        throw nb::type_error("tensor: an index must be a number, a slice or an ellipsis");
      if (at < -count || at >= count) {
        const std::string message = "tensor: index " + std::to_string(at) + " of dimension " +
                                    std::to_string(dim) + ", which has " + std::to_string(count) +
                                    " entries";
        throw nb::index_error(message.c_str());
      }
      offset += static_cast<uint64_t>(at < 0 ? at + count : at) * tensor.stride(dim);
    }
    ++dim;
  }
  while (dim < tensor.rank()) keep();
  return view_of(bound, tensor.strided(dims_of(shape), dims_of(strides), offset));
}

// Calls action(element type's value) for the tensor's dtype.
template <class Action>
void with_element(DType dtype, const Action& action) {
  switch (dtype) {
    case DType::f32:
      return action(float{});
    case DType::f16:
      return action(Half{});
    case DType::bf16:
      return action(BFloat16{});
    case DType::u8:
      return action(uint8_t{});
    case DType::i32:
      return action(int32_t{});
    case DType::u32:
      return action(uint32_t{});
    case DType::i64:
      return action(int64_t{});
  }
}

// The host's side of a copy: contiguous memory of the same shape and dtype.
Tensor host_side(const char* what, const Tensor& tensor, const Operand& operand) {
  Tensor host = as_tensor(operand.object, device_of("cpu"), what).tensor;
  if (host.shape() != tensor.shape())
    refuse(what, ": the tensor has shape ", tensor.shape(), ", the other ", host.shape());
  return host;
}

void write_from(const BoundTensor& bound, const Operand& source) {
  const Tensor from = host_side("tensor.write_from", bound.tensor, source);
  with_element(from.dtype(), [&]<class T>(T) {
    const std::span<const T> elements = from.data<const T>();
    without_gil([&] { bound.tensor.write_from<T>(elements); });
  });
}

void read_to(const BoundTensor& bound, const Operand& target) {
  const Tensor to = host_side("tensor.read_to", bound.tensor, target);
  with_element(to.dtype(), [&]<class T>(T) {
    const std::span<T> elements = to.data<T>();
    without_gil([&] { bound.tensor.read_to<T>(elements); });
  });
}

BoundTensor copy(const BoundTensor& bound) {
  const Tensor& from = bound.tensor;
  const Tensor to = bound.device.tensor(from.dtype(), from.shape());
  with_element(from.dtype(), [&]<class T>(T) {
    without_gil([&] {
      std::vector<T> elements(from.elements());
      from.read_to<T>(elements);
      to.write_from<T>(elements);
    });
  });
  return {bound.device, to};
}

nb::object dlpack(const BoundTensor& bound, std::optional<int64_t> stream,
                  const std::optional<std::pair<int64_t, int64_t>>& max_version,
                  const std::optional<std::pair<int32_t, int32_t>>& device,
                  std::optional<bool> copied) {
  const bool cuda = bound.device.stream() != 0;
  if (!cuda && stream.has_value() && *stream != -1)
    refuse("tensor.__dlpack__: stream ", *stream, " for memory of ", bound.device.info().name,
           ", which has no streams");
  if (cuda && stream == 0)
    refuse(
        "tensor.__dlpack__: stream 0 is ambiguous; 1 is the legacy default stream, 2 the one of "
        "each thread");
  const auto here = nb::cast<std::pair<int32_t, int32_t>>(dlpack_device(bound));
  if (device.has_value() && *device != here) {
    const std::string message = "tensor.__dlpack__: the memory is on " + bound.device.info().name +
                                "; to have it elsewhere, copy it with read_to";
    throw nb::buffer_error(message.c_str());
  }
  const bool versioned = max_version.has_value() && max_version->first >= 1;
  if (!versioned && bound.tensor.is_read_only() && copied != true)
    throw nb::buffer_error(
        "tensor.__dlpack__: the memory is read-only, which only DLPack 1.0 can say; ask with "
        "max_version=(1, 0)");
  // Whatever stream asks: everything is done before the capsule is there.
  if (cuda && stream != -1) without_gil([&] { bound.device.wait(); });
  return to_dlpack(copied == true ? copy(bound) : bound, versioned);
}

BoundTensor zeros(const Sizes& shape, const std::string& dtype, const DeviceLike& device) {
  Device home = device_of(device);
  Tensor tensor = home.tensor(dtype_named(dtype), dims_of(shape));
  return {std::move(home), std::move(tensor)};
}

std::optional<Device> wanted(const std::optional<DeviceLike>& device) {
  if (!device.has_value()) return std::nullopt;
  return device_of(*device);
}

void bind_views(nb::class_<BoundTensor>& tensor) {
  tensor
      .def(
          "slice",
          [](const BoundTensor& self, uint32_t dim, uint64_t begin, uint64_t count) {
            return view_of(self, self.tensor.slice(dim, begin, count));
          },
          "dim"_a, "begin"_a, "count"_a,
          "Returns `count` entries of one dimension, from `begin` on.")
      .def(
          "permute",
          [](const BoundTensor& self, const Sizes& order) {
            return view_of(self, self.tensor.permute(dims_of(order)));
          },
          "order"_a, "Returns a view with the dimensions in another order.")
      .def(
          "reshape",
          [](const BoundTensor& self, const Sizes& shape) {
            return view_of(self, self.tensor.reshape(dims_of(shape)));
          },
          "shape"_a, "Returns the same elements in another shape; the tensor must be contiguous.")
      .def(
          "strided",
          [](const BoundTensor& self, const Sizes& shape, const Sizes& strides, uint64_t offset) {
            return view_of(self, self.tensor.strided(dims_of(shape), dims_of(strides), offset));
          },
          "shape"_a, "strides"_a, "offset_elements"_a = 0,
          "Returns any view between this one's first and last element; strides count elements.")
      .def("__getitem__", index, "key"_a,
           nb::sig("def __getitem__(self, key: gyre.types.Index | tuple[gyre.types.Index, ...], /) "
                   "-> Tensor"),
           "Returns a view. Numbers, slices with a positive step and an ellipsis are taken.");
}

void bind_exchange(nb::class_<BoundTensor>& tensor) {
  tensor
      .def("numpy", to_numpy, nb::sig("def numpy(self) -> gyre.types.NumpyArray"),
           "Returns a NumPy array of the same memory, which it keeps alive. bf16 needs ml_dtypes. "
           "Memory of a GPU is refused: use read_to.")
      .def(
          "__array__",
          [](nb::handle self, nb::handle dtype, nb::handle copied) {
            nb::object array = to_numpy(self);
            if (dtype.is_none() && copied.is_none()) return array;
            nb::dict arguments;
            if (!copied.is_none()) arguments["copy"] = copied;
            if (!dtype.is_none()) arguments["dtype"] = dtype;
            return nb::object(nb::module_::import_("numpy").attr("array")(array, **arguments));
          },
          "dtype"_a = nb::none(), "copy"_a = nb::none(),
          nb::sig("def __array__(self, dtype: object = None, copy: bool | None = None) -> "
                  "gyre.types.NumpyArray"),
          "Returns the elements as a NumPy array, for numpy.asarray().")
      .def("__dlpack__", dlpack, nb::kw_only(), "stream"_a = nb::none(),
           "max_version"_a = nb::none(), "dl_device"_a = nb::none(), "copy"_a = nb::none(),
           "Returns a DLPack capsule of the same memory. On CUDA it waits for the device first, "
           "whatever the stream; -1 does not wait.")
      .def("__dlpack_device__", dlpack_device,
           nb::sig("def __dlpack_device__(self) -> tuple[int, int]"),
           "Returns (1, 0) for the CPU and (2, n) for cuda:n.")
      .def("write_from", write_from, "source"_a,
           "Copies all elements from the host: an array of the same shape and dtype, contiguous.")
      .def("read_to", read_to, "target"_a,
           "Copies all elements to the host: an array of the same shape and dtype, contiguous. "
           "Sees all work that was submitted before.")
      .def("copy", copy, "Returns a contiguous copy on the same device.");
}

}  // namespace

DType dtype_named(std::string_view given) {
  std::string names;
  for (uint32_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name(dtype) == given) return dtype;
    names += (names.empty() ? "" : ", ") + std::string(name(dtype));
  }
  refuse("tensor: dtype must be one of ", names, "; got \"", given, "\"");
}

Dims dims_of(const Sizes& sizes) { return Dims(std::span(sizes)); }

nb::tuple tuple_of(const Dims& dims) {
  nb::list list;
  for (const uint64_t n : dims) list.append(n);
  return nb::tuple(list);
}

void bind_tensor(nb::module_& module) {
  nb::class_<BoundTensor> tensor(
      module, "Tensor", nb::is_weak_referenceable(),
      "A typed, strided view of a device's memory with at most 6 dimensions. Views share memory; "
      "it lives as long as a view, an array made of it or work that uses it. empty(), zeros(), "
      "from_numpy(), from_dlpack() and asarray() make one.");
  tensor
      .def_prop_ro(
          "shape", [](const BoundTensor& self) { return tuple_of(self.tensor.shape()); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "The length of each dimension.")
      .def_prop_ro(
          "strides", [](const BoundTensor& self) { return tuple_of(self.tensor.strides()); },
          nb::sig("def strides(self) -> tuple[int, ...]"), "The strides in elements, not bytes.")
      .def_prop_ro(
          "dtype", [](const BoundTensor& self) { return std::string(name(self.tensor.dtype())); },
          "The element type: f32, f16, bf16, u8, i32, u32 or i64.")
      .def_prop_ro(
          "device", [](const BoundTensor& self) { return self.device; },
          "The device of its memory.")
      .def_prop_ro(
          "data_ptr", [](const BoundTensor& self) { return self.tensor.address(); },
          "The address of the first element, as the device sees it.")
      .def_prop_ro(
          "ndim", [](const BoundTensor& self) { return self.tensor.rank(); },
          "The number of dimensions.")
      .def_prop_ro(
          "size", [](const BoundTensor& self) { return self.tensor.elements(); },
          "The number of elements.")
      .def_prop_ro(
          "nbytes", [](const BoundTensor& self) { return self.tensor.bytes(); },
          "The bytes of the elements.")
      .def_prop_ro(
          "is_contiguous", [](const BoundTensor& self) { return self.tensor.is_contiguous(); },
          "True if the elements lie one after the other in row-major order.")
      .def_prop_ro(
          "is_read_only", [](const BoundTensor& self) { return self.tensor.is_read_only(); },
          "True if the memory came read-only: ops refuse to write it.")
      .def(
          "__len__",
          [](const BoundTensor& self) {
            if (self.tensor.rank() == 0) throw nb::type_error("tensor: len() of rank 0");
            return self.tensor.shape(0);
          },
          "Returns the length of the first dimension.")
      .def("__repr__", repr);
  bind_views(tensor);
  bind_exchange(tensor);

  module.def("zeros", zeros, "shape"_a, "dtype"_a = "f32", "device"_a = "cpu",
             "Returns a contiguous tensor of zeros in a device's own memory.");
  module.def("empty", zeros, "shape"_a, "dtype"_a = "f32", "device"_a = "cpu",
             "Does what zeros() does: a device's memory is always zero-filled.");
  module.def(
      "from_numpy", [](nb::handle array) { return from_numpy(array, std::nullopt, "from_numpy"); },
      "array"_a, nb::sig("def from_numpy(array: gyre.types.NumpyArray) -> Tensor"),
      "Shares the memory of an array of float32, float16, uint8, int32, uint32, int64, or bfloat16 "
      "of ml_dtypes. A read-only array gives a tensor that ops refuse to write.");
  module.def(
      "from_dlpack",
      [](const Operand& source, const std::optional<DeviceLike>& device, bool ordered) {
        const Order order = ordered ? Order::wait : Order::none;
        return from_dlpack(source.object, wanted(device), "from_dlpack", order);
      },
      "x"_a, "device"_a = nb::none(), nb::kw_only(), "ordered"_a = true,
      "Shares the memory of anything with __dlpack__, or of a capsule. device says where it must "
      "be, by default the shared device of where it is; memory elsewhere is refused, never copied. "
      "With ordered, Gyre's CUDA stream waits for what the producer has queued, and submitted work "
      "holds the memory until it is done. Pass False for lists that Encoder.submit_on() puts on "
      "the producer's own stream: submit_on() then lets go of the memory when it returns, because "
      "its owner frees it in the order of that stream.");
  module.def(
      "asarray",
      [](const Operand& source, const std::optional<DeviceLike>& device) {
        return as_tensor(source.object, wanted(device), "asarray");
      },
      "x"_a, "device"_a = nb::none(),
      "Returns a Tensor as it is and shares a NumPy array, or anything with __dlpack__, without a "
      "copy.");
}

}  // namespace gyre::python
