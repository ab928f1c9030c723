#include <array>

#include "runtime/require.h"

namespace gyre {
namespace {

// Copies share the text: throwing one takes no memory but the exception's own, of which the
// language runtime keeps some for such a moment.
const std::array<Error, 6> kPrepared = [] {
  const auto error = [](ErrorCode code) {
    return Error(code, join(name(code), ": there is no memory for the message"));
  };
  return std::array{error(ErrorCode::invalid_argument),
                    error(ErrorCode::unsupported),
                    Error(ErrorCode::out_of_memory, "out of memory"),
                    error(ErrorCode::compile_failed),
                    error(ErrorCode::device_lost),
                    error(ErrorCode::io)};
}();

}  // namespace

void fail_without_memory(ErrorCode code) { throw Error(kPrepared[static_cast<size_t>(code)]); }

void out_of_memory(const char* op) {
  fail(ErrorCode::out_of_memory, op, ": the host is out of memory");
}

}  // namespace gyre
