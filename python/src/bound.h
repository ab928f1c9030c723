#pragma once

#include <gyre/gyre.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "release.h"

namespace gyre::python {

namespace nb = nanobind;
using namespace nb::literals;

// A tensor and the device it lives on, which a tensor of C++ does not name.
struct BoundTensor {
  Device device;
  Tensor tensor;
};

// What ops take for a tensor: a gyre.Tensor, a NumPy array, or anything with __dlpack__.
struct Operand {
  nb::object object;
};
using OptionalOperand = std::optional<Operand>;

using DeviceLike = std::variant<std::string, Device>;
using Sizes = std::vector<uint64_t>;

// Opening a device by name alone gives the same one to everybody in the process.
Device device_of(const DeviceLike& device);

// Numbers without dots between thousands, whatever the locale of the process is.
inline std::ostringstream plain_text() {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  return text;
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text = plain_text();
  (text << ... << parts);
  throw Error(ErrorCode::invalid_argument, text.str());
}

DType dtype_named(std::string_view given);
Dims dims_of(const Sizes& sizes);
nb::tuple tuple_of(const Dims& dims);

template <class Enum>
struct Choice {
  std::string_view name;
  Enum value;
};

// `what` is "rope: pairing".
template <class Enum, size_t Count>
Enum choose(const char* what, std::string_view given, const Choice<Enum> (&choices)[Count]) {
  std::string names;
  for (const Choice<Enum>& choice : choices) {
    if (choice.name == given) return choice.value;
    names += (names.empty() ? "" : ", ") + std::string(choice.name);
  }
  refuse(what, " must be one of ", names, "; got \"", given, "\"");
}

// What an op wrote: the caller's own object, or a new gyre.Tensor.
struct Written {
  Tensor tensor;
  Operand result;
};

inline Tensor tensor_of(const std::optional<Written>& written) {
  return written ? written->tensor : Tensor();
}

// What an op with one or two outputs returns.
inline Operand results(const Written& first, const std::optional<Written>& second) {
  if (!second) return first.result;
  return {nb::make_tuple(first.result.object, second->result.object)};
}

// One op's tensors, on its encoder's device. Memory is shared, never copied; what belongs to
// another library is held until the recorded work is done.
class Operands {
 public:
  Operands(const Encoder& encoder, const char* op) : device_(encoder.device()), op_(op) {}

  Tensor operator()(const char* name, const Operand& operand) const;
  Tensor operator()(const char* name, const OptionalOperand& operand) const {
    return operand.has_value() ? (*this)(name, *operand) : Tensor();
  }
  // What the op writes: `given`, or new memory of this shape where it is None.
  Written written(const char* name, const OptionalOperand& given, DType dtype,
                  const Dims& shape) const;
  // A second output, like `source`: none where there is no source and nothing is given.
  std::optional<Written> written_like(const char* name, const OptionalOperand& given,
                                      const Tensor& source) const;

 private:
  const Device& device_;
  const char* op_;
};

void bind_errors(nb::module_& module);
void bind_device(nb::module_& module);
void bind_tensor(nb::module_& module);
void bind_encoder(nb::module_& module);
void bind_quantize(nb::module_& module);
void bind_rope(nb::module_& module);
void bind_rope_append(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_buffer(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_kv_calibration(nb::module_& module);
void bind_kv_pages(nb::module_& module);
void bind_kv_pool(nb::module_& module);
void bind_kv_snapshot(nb::module_& module);
void bind_prepare(nb::module_& module);

inline KvStepEnd step_end(bool captured) {
  return captured ? KvStepEnd::captured : KvStepEnd::checked;
}

}  // namespace gyre::python

namespace nanobind::detail {

template <>
struct type_caster<gyre::python::Operand> {
  // What comes back is the array that the caller gave, or a new gyre.Tensor.
  NB_TYPE_CASTER(gyre::python::Operand, io_name("gyre.types.SupportsDLPack", "typing.Any"))

  bool from_python(handle source, uint32_t /*flags*/, cleanup_list* /*cleanup*/) noexcept {
    if (source.is_none()) return false;
    value.object = borrow(source);
    return true;
  }
  static handle from_cpp(const gyre::python::Operand& operand, rv_policy /*policy*/,
                         cleanup_list* /*cleanup*/) noexcept {
    return operand.object.inc_ref();
  }
};

}  // namespace nanobind::detail
