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

// The Source and kCalibrated of a writer. Calibrated rows are all alike, and of native formats.
struct WriterSource {
  std::string type;    // empty: no such kernel
  std::string suffix;  // the last template argument, if it is not the default
};
inline WriterSource writer_source(uint32_t dtype, uint32_t calibrated, uint32_t k_format,
                                  uint32_t v_format) {
  const bool is_native = ((calibrated & 1) == 0 || abi::kv_is_native(k_format)) &&
                         ((calibrated & 2) == 0 || abi::kv_is_native(v_format));
  if (calibrated > 3 || !is_native) return {};
  if (calibrated == 3) return {"gyre::cuda::CalibratedRow", ""};
  return {float_name(dtype), calibrated != 0 ? ", " + std::to_string(calibrated) : ""};
}

inline bool is_dense(uint32_t format) { return format < 3; }

}  // namespace gyre::cuda
