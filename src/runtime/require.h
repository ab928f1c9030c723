#pragma once

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
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(ErrorCode code, const Parts&... parts) {
  throw Error(code, join(parts...));
}

// The message is put together only when the rule is broken.
template <class... Parts>
inline void require(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]] {
    fail(ErrorCode::invalid_argument, parts...);
  }
}

}  // namespace gyre
