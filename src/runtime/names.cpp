#include <array>

#include "gyre/dtype.h"
#include "gyre/error.h"

namespace gyre {

std::string_view name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::compile_failed:
      return "compile_failed";
    case ErrorCode::device_lost:
      return "device_lost";
    case ErrorCode::io:
      return "io";
  }
  return "unknown";
}

std::string_view name(DType dtype) {
  constexpr std::array<std::string_view, kDTypeCount> kNames = {"f32", "f16", "bf16", "u8",
                                                                "i32", "u32", "i64"};
  const auto index = static_cast<size_t>(dtype);
  return index < kNames.size() ? kNames[index] : "invalid";
}

}  // namespace gyre
