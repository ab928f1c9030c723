#pragma once
// What codes of the mlx-native formats stand for.
#include "abi/kv_codec.h"
#include "abi/kv_mlx_native.h"
#include "metal/kernels/kernel.h"

namespace gyre {
namespace metal {

// Positive halves of a codebook, as abi/kv_mlx_native.h has them.
inline uint mlx_native_half(uint format) { return 1u << (abi::kv_bits(format) - 1); }
inline float mlx_native_centroid(uint format, uint i) {
  if (format == abi::kMlxNative4) return abi::kMlxNative4Centroids[i];
  if (format == abi::kMlxNative5) return abi::kMlxNative5Centroids[i];
  return format == abi::kMlxNative6 ? abi::kMlxNative6Centroids[i] : abi::kMlxNative8Centroids[i];
}
inline float mlx_native_level(uint format, uint code) {
  const uint count = mlx_native_half(format), index = code & (2 * count - 1);
  return index >= count ? mlx_native_centroid(format, index - count)
                        : -mlx_native_centroid(format, count - 1 - index);
}

// What a normalised coordinate is multiplied with: to have variance 1, but at 512 as the cache
// says.
inline float mlx_native_unit(uint head_dim, float scale_factor) {
  return head_dim == 512 ? scale_factor : precise::sqrt(static_cast<float>(head_dim));
}

}  // namespace metal
}  // namespace gyre
