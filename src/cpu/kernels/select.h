#pragma once
// From a number at run time to code at compile time.

#include "cpu/kernel.h"
#include "gyre/dtype.h"

namespace gyre::cpu {

// make(T()) for the type of a float dtype; null for what is none.
template <class Make>
TaskFn select_float(uint32_t dtype, const Make& make) {
  switch (static_cast<DType>(dtype)) {
    case DType::f32:
      return make(float());
    case DType::f16:
      return make(Half());
    case DType::bf16:
      return make(BFloat16());
    default:
      return nullptr;
  }
}

}  // namespace gyre::cpu
