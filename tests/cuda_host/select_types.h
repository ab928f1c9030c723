#pragma once
// From formats and dtypes at run time to kernels' template arguments.
#include <cstdint>
#include <utility>

#include "abi/kv_codec.h"
#include "cuda_host/host_device.h"
// After cuda_host.h
#include "cuda/kernels/convert.cuh"

namespace gyre::test {

// run(integral_constant<format>) for a format at run time.
template <uint32_t... kFormats, class Run>
cpu::TaskFn with_format(std::integer_sequence<uint32_t, kFormats...> /*all*/, uint32_t format,
                        const Run& run) {
  cpu::TaskFn found = nullptr;
  ((format == kFormats ? void(found = run(std::integral_constant<uint32_t, kFormats>())) : void()),
   ...);
  return found;
}
template <uint32_t kFirst, uint32_t... kOffsets, uint32_t... kMore>
constexpr auto formats_from(std::integer_sequence<uint32_t, kOffsets...> /*native*/,
                            std::integer_sequence<uint32_t, kMore...> /*others*/) {
  return std::integer_sequence<uint32_t, (kFirst + kOffsets)..., kMore...>();
}
using AllNative = std::make_integer_sequence<uint32_t, abi::kLastNative - abi::kFirstNative + 1>;
using Native =
    decltype(formats_from<abi::kFirstNative>(AllNative(), std::integer_sequence<uint32_t>()));
using Compressed = decltype(formats_from<abi::kFirstNative>(
    AllNative(), std::integer_sequence<uint32_t, abi::kMlxNative4, abi::kMlxNative5,
                                       abi::kMlxNative6, abi::kMlxNative8>()));

template <class Run>
cpu::TaskFn with_float(uint32_t dtype, const Run& run) {
  if (dtype == 0) return run(float());
  if (dtype == 1) return run(cuda::Half());
  return run(cuda::BFloat16());
}

}  // namespace gyre::test
