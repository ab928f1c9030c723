#include <array>
#include <typeinfo>

#include "bound.h"

namespace gyre::python {
namespace {

constexpr size_t kCodes = 6;

// What the translator raises, by code. They live as long as the process.
std::array<PyObject*, kCodes>& classes() {
  static std::array<PyObject*, kCodes> all{};
  return all;
}

PyObject* new_error(nb::module_& module, const char* name, const char* text, nb::handle bases,
                    std::string_view code) {
  const std::string full = nb::cast<std::string>(module.attr("__name__")) + "." + name;
  nb::dict members;
  members["code"] = nb::str(code.data(), code.size());
  PyObject* const created =
      PyErr_NewExceptionWithDoc(full.c_str(), text, bases.ptr(), members.ptr());
  if (created == nullptr) throw nb::python_error();
  module.attr(name) = nb::borrow(created);
  return created;
}

struct Kind {
  ErrorCode code;
  const char* name;
  PyObject* also;  // the Python class that means the same
  const char* text;
};

void translate(const std::exception_ptr& pointer, void* /*unused*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(classes()[static_cast<size_t>(error.code())], error.what());
  } catch (const std::bad_cast&) {  // an attribute that an argument's protocol promises
    PyErr_SetString(PyExc_TypeError,
                    "an argument's __dlpack_device__ or __array_interface__ has values of the "
                    "wrong type");
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  PyObject* const base =
      new_error(module, "Error",
                "A call that was refused or failed: the message names the op, the rule that must "
                "hold and the value that broke it. A refused call has changed nothing. `code` is "
                "the name of the kind, as in C++; each kind is a class of its own below this one.",
                PyExc_Exception, "");
  const Kind kinds[] = {
      {ErrorCode::invalid_argument, "InvalidArgument", PyExc_ValueError,
       "The input was wrong. Also a ValueError."},
      {ErrorCode::unsupported, "Unsupported", PyExc_NotImplementedError,
       "The device or this machine cannot do it. Also a NotImplementedError."},
      {ErrorCode::out_of_memory, "OutOfMemory", PyExc_MemoryError,
       "There is not enough memory. Also a MemoryError."},
      {ErrorCode::compile_failed, "CompileFailed", PyExc_RuntimeError,
       "A kernel could not be compiled. Also a RuntimeError."},
      {ErrorCode::device_lost, "DeviceLost", PyExc_RuntimeError,
       "The device failed and can do no more work. Also a RuntimeError."},
      {ErrorCode::io, "IoError", PyExc_OSError,
       "A file could not be read or written. Also an OSError."},
  };
  static_assert(sizeof(kinds) / sizeof(kinds[0]) == kCodes);
  for (const Kind& kind : kinds) {
    const nb::tuple bases = nb::make_tuple(nb::borrow(base), nb::borrow(kind.also));
    classes()[static_cast<size_t>(kind.code)] =
        new_error(module, kind.name, kind.text, bases, name(kind.code));
  }
  nb::register_exception_translator(translate);
}

}  // namespace gyre::python
