#pragma once
// Pieces of name expressions.

#include <cstdint>
#include <string>

#include "abi/kv_codec.h"

namespace gyre::cuda {

// Type of a float DType in kernels' text; empty for what is none.
inline std::string float_name(uint32_t dtype) {
  constexpr const char* kNames[] = {"float", "gyre::cuda::Half", "gyre::cuda::BFloat16"};
  return dtype < 3 ? kNames[dtype] : "";
}

inline bool is_compressed(uint32_t format) {
  return abi::kv_is_native(format) || abi::kv_is_compat(format);
}
inline bool is_dense(uint32_t format) { return format < 3; }

}  // namespace gyre::cuda
