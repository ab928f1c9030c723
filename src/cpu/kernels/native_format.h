#pragma once

#include "abi/kv_codec.h"

namespace gyre::cpu {

template <uint32_t kFormat>
struct NativeFormat {
  static constexpr uint32_t value = kFormat;
};

// Calls run(NativeFormat<format>()). Instantiated with a local lambda only, so it belongs to its
// file alone: files compiled with special instructions use it, too.
template <class Run>
void with_native_format(uint32_t format, const Run& run) {
  switch (format) {
    case abi::kTq2:
      return run(NativeFormat<abi::kTq2>());
    case abi::kTq3:
      return run(NativeFormat<abi::kTq3>());
    case abi::kTq4:
      return run(NativeFormat<abi::kTq4>());
    case abi::kTq5:
      return run(NativeFormat<abi::kTq5>());
    case abi::kTq6:
      return run(NativeFormat<abi::kTq6>());
    default:
      return run(NativeFormat<abi::kTq8>());
  }
}

}  // namespace gyre::cpu
