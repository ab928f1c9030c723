#pragma once

#include <exception>
#include <string>
#include <utility>

#include "c_api/handle_kind.h"
#include "gyre/c/base.h"
#include "runtime/require.h"

namespace gyre::c_api {

// What this layer refuses itself. The message lacks the function's name, which guard() knows; the
// messages of the ops have theirs.
struct Refusal {
  std::string message;
};

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  throw Refusal{join(parts...)};
}

// The status of the exception that is being handled; keeps its message for gyre_last_error().
gyre_status keep_error(const char* function) noexcept;

// The body of every call that can fail: no exception leaves it.
template <class Body>
gyre_status guard(const char* function, const Body& body) noexcept {
  try {
    body();
    return GYRE_OK;
  } catch (...) {
    return keep_error(function);
  }
}

template <class T>
T& deref(T* pointer, const char* name) {
  if (pointer == nullptr) refuse(name, " is NULL");
  if constexpr (requires { T::kKind; }) {
    if (pointer->kind != T::kKind)
      refuse(name, " must be ", name_of(T::kKind), ", got ", name_of(pointer->kind));
  }
  return *pointer;
}

// Calls that answer through their last argument.
template <class T, class Body>
gyre_status answer(const char* function, T* out, const char* name, const Body& body) noexcept {
  return guard(function, [&] {
    T& to = deref(out, name);  // first: an assignment's right side is evaluated before its left
    to = static_cast<T>(body());
  });
}

// Calls that make a handle; it is NULL where they fail.
template <class Handle, class Body>
gyre_status make(const char* function, Handle** out, const char* name, const Body& body) noexcept {
  return guard(function, [&] {
    deref(out, name) = nullptr;
    *out = new Handle{{.value = body()}};
  });
}

}  // namespace gyre::c_api
