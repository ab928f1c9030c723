#pragma once
// Parts of name expressions.

#include <cstdint>
#include <string>

#include "abi/write.h"

namespace gyre::cuda {

// Type of a float DType in kernels' text; empty for other dtypes.
inline std::string float_name(uint32_t dtype) {
  constexpr const char* kNames[] = {"float", "gyre::cuda::Half", "gyre::cuda::BFloat16"};
  return dtype < 3 ? kNames[dtype] : "";
}

// The Source and kCalibrated of a writer. Calibrated rows are all alike, and of native formats.
struct WriterSource {
  std::string type;    // empty: no such kernel
  std::string suffix;  // the last template argument, if it is not the default
};
inline WriterSource writer_source(const abi::WriteSpec& s) {
  const bool is_native = ((s.calibrated & 1) == 0 || abi::kv_is_native(s.k_format)) &&
                         ((s.calibrated & 2) == 0 || abi::kv_is_native(s.v_format));
  if (s.calibrated > 3 || !is_native) return {};
  if (s.calibrated == 3) return {"gyre::cuda::CalibratedRow", ""};
  return {float_name(s.source_dtype), s.calibrated != 0 ? ", " + std::to_string(s.calibrated) : ""};
}

inline bool is_dense(uint32_t format) { return format < 3; }

}  // namespace gyre::cuda
