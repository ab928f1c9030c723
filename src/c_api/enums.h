#pragma once

#include <initializer_list>

#include "c_api/guard.h"
#include "gyre/dtype.h"
#include "gyre/format.h"

namespace gyre::c_api {

DType dtype(gyre_dtype given, const char* name);
gyre_dtype from_dtype(DType dtype);
KvFormat kv_format(gyre_kv_format given, const char* name);
gyre_kv_format from_kv_format(KvFormat format);

inline DType dtype_or(gyre_dtype given, DType otherwise, const char* name) {
  return given != 0 ? dtype(given, name) : otherwise;
}
inline KvFormat kv_format_or(gyre_kv_format given, KvFormat otherwise, const char* name) {
  return given != 0 ? kv_format(given, name) : otherwise;
}

// Enumerations with the same numbers in C and C++.
template <class Enum, class... Name>
Enum same_number(int32_t given, std::initializer_list<Enum> values, const Name&... name) {
  for (const Enum value : values) {
    if (static_cast<int32_t>(value) == given) return value;
  }
  refuse(name..., " is ", given, ", which names nothing");
}

}  // namespace gyre::c_api
