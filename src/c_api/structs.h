#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "c_api/guard.h"

namespace gyre::c_api {

// Takes a caller's struct of another version: what it lacks is 0, what it has more must be 0.
void copy_in(void* to, uint64_t known, const void* from, const char* name);
// Gives one back: as much as the caller's has, 0 in what it has more. Its size stays.
void copy_out(void* to, uint64_t known, const void* from, const char* name);

template <class Struct>
Struct read(const Struct* given, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % 8 == 0);
  Struct value{};
  copy_in(&value, sizeof value, &deref(given, name), name);
  if constexpr (requires { value.reserved; }) {
    if (value.reserved != 0) refuse(name, ".reserved must be 0, got ", value.reserved);
  }
  return value;
}

template <class Struct>
Struct read_or_default(const Struct* given, const char* name) {
  return given != nullptr ? read(given, name) : Struct{};
}

// The caller's sizeof is also the distance of its structs.
template <class Struct>
const Struct* element(const Struct* first, uint64_t index) {
  return reinterpret_cast<const Struct*>(reinterpret_cast<const char*>(first) +
                                         index * first->size);
}
template <class Struct>
Struct* element(Struct* first, uint64_t index) {
  return const_cast<Struct*>(element(static_cast<const Struct*>(first), index));
}

// No more than `limit`: the count is the caller's, and decides what is read.
template <class Struct>
std::vector<Struct> read_array(const Struct* first, uint64_t count, uint64_t limit,
                               const char* name) {
  if (count > limit) refuse(name, ": at most ", limit, ", got ", count);
  std::vector<Struct> values;
  for (uint64_t i = 0; i < count; ++i) {
    values.push_back(read(i == 0 ? first : element(first, i), name));
    if (element(first, i)->size != first->size) {
      refuse(name, "[", i, "].size is ", element(first, i)->size, ", and [0]'s is ", first->size);
    }
  }
  return values;
}

template <class Struct>
void write(Struct* to, const Struct& value, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % 8 == 0);
  copy_out(&deref(to, name), sizeof value, &value, name);
}

template <class T>
T or_default(T given, T otherwise) {
  return given != T{} ? given : otherwise;
}

}  // namespace gyre::c_api
