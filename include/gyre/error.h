#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "gyre/export.h"

namespace gyre {

enum class ErrorCode : uint8_t {
  invalid_argument,
  unsupported,
  out_of_memory,
  compile_failed,
  device_lost,
  io,
};

GYRE_API std::string_view name(ErrorCode code);

// The one exception type. The message names the op, the rule that must hold and the value that
// broke it.
class GYRE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace gyre
