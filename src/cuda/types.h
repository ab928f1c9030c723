#pragma once

#include "gyre/dtype.h"

namespace gyre::cuda {

// The name that kernels/convert.cuh gives a floating-point dtype; null for all others.
inline const char* float_type(uint32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::f32:
      return "float";
    case DType::f16:
      return "gyre::cuda::Half";
    case DType::bf16:
      return "gyre::cuda::BFloat16";
    default:
      return nullptr;
  }
}

}  // namespace gyre::cuda
