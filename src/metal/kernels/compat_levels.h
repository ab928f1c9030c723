#pragma once
// What codes of the compatibility formats stand for.
#include "abi/kv_codec.h"
#include "abi/kv_compat.h"
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

// Positive halves of a codebook, as abi/kv_compat.h has them.
inline uint compat_half(uint format) { return 1u << (abi::kv_bits(format) - 1); }
inline float compat_centroid(uint format, uint i) {
  if (format == abi::kCompat4) return abi::kCompat4Centroids[i];
  if (format == abi::kCompat5) return abi::kCompat5Centroids[i];
  return format == abi::kCompat6 ? abi::kCompat6Centroids[i] : abi::kCompat8Centroids[i];
}
inline float compat_level(uint format, uint code) {
  const uint count = compat_half(format), index = code & (2 * count - 1);
  return index >= count ? compat_centroid(format, index - count)
                        : -compat_centroid(format, count - 1 - index);
}

// What a normalised coordinate is multiplied with: to have variance 1, but at 512 as the cache
// says.
inline float compat_unit(uint head_dim, float scale_factor) {
  return head_dim == 512 ? scale_factor : precise::sqrt(static_cast<float>(head_dim));
}

}  // namespace metal
}  // namespace gyre
