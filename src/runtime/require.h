#pragma once

#include <locale>
#include <new>
#include <ostream>
#include <sstream>
#include <string>

#include "gyre/dtype.h"
#include "gyre/error.h"

namespace gyre {

inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name(dtype); }

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  text.exceptions(std::ios::badbit);   // no memory: throws, instead of a text that is cut
  text.imbue(std::locale::classic());  // no dots between thousands, whatever the program's is
  (text << ... << parts);
  return text.str();
}

// An error that was made when the library was loaded: there is no memory for a message.
[[noreturn]] void fail_without_memory(ErrorCode code);

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(ErrorCode code, const Parts&... parts) {
  try {
    throw Error(code, join(parts...));
  } catch (const std::bad_alloc&) {
    fail_without_memory(code);
  }
}

// What every public call that takes memory does with std::bad_alloc: it leaves as gyre::Error.
[[noreturn, gnu::cold]] void out_of_memory(const char* op);

// The message is built only when the rule is broken.
template <class... Parts>
inline void require(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]] {
    fail(ErrorCode::invalid_argument, parts...);
  }
}

}  // namespace gyre
