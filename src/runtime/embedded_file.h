#pragma once

#include <span>
#include <string_view>

namespace gyre {

// A kernel's source as the build embedded it (cmake/embed.cmake), in parts below the limit of one
// literal.
struct EmbeddedFile {
  const char* name;  // "cuda/kernels/kv_copy.cu", "abi/kv_copy.h"
  std::span<const std::string_view> parts;
};

}  // namespace gyre
