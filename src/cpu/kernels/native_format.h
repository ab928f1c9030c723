#pragma once

#include "abi/kv_codec.h"

namespace gyre::cpu {

template <uint32_t kFormat>
struct NativeFormat {
  static constexpr uint32_t value = kFormat;
};

// Calls run(NativeFormat<format>()). Instantiated with a local lambda only, so it belongs to its
// file alone: files compiled with special instructions use it, too.
template <uint32_t kFormat = abi::kFirstNative, class Run>
void with_native_format(uint32_t format, const Run& run) {
  if constexpr (kFormat < abi::kLastNative) {
    if (format != kFormat) return with_native_format<kFormat + 1>(format, run);
  }
  run(NativeFormat<kFormat>());
}

}  // namespace gyre::cpu
