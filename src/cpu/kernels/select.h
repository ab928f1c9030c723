#pragma once
// From a number at run time to code at compile time.

#include "cpu/kernel.h"
#include "gyre/dtype.h"

namespace gyre::cpu {

// make(T()) for the type of a float dtype; nothing for other dtypes.
template <class Make>
auto select_float(uint32_t dtype, const Make& make) -> decltype(make(float())) {
  switch (static_cast<DType>(dtype)) {
    case DType::f32:
      return make(float());
    case DType::f16:
      return make(Half());
    case DType::bf16:
      return make(BFloat16());
    default:
      return decltype(make(float()))();
  }
}

// make(T(), Calibrated<mask>()) for the dtype and the streams (1 K, 2 V) whose sources are
// calibrated rows.
template <uint32_t kMask>
struct Calibrated {
  static constexpr uint32_t value = kMask;
};
template <class Make>
TaskFn select_source(uint32_t dtype, uint32_t calibrated, const Make& make) {
  return select_float(dtype, [&](auto source) -> TaskFn {
    switch (calibrated) {
      case 0:
        return make(source, Calibrated<0>());
      case 1:
        return make(source, Calibrated<1>());
      case 2:
        return make(source, Calibrated<2>());
      case 3:
        return make(source, Calibrated<3>());
      default:
        return nullptr;
    }
  });
}

}  // namespace gyre::cpu
