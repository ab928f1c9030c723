#pragma once
// Where one half of a KV cache has its codes and scales: what every kernel over a cache is told.
#include "abi/types.h"

namespace gyre::abi {

// Strides in bytes. A tile is 8 slots: 8 rows of K, one tile of V.
struct KvCacheLayout {
  uint64_t codes_head_stride;
  uint64_t codes_tile_stride;
  uint64_t scales_head_stride;
  uint64_t scales_tile_stride;
  uint32_t format;
  uint32_t role;  // KvRole
  uint32_t head_dim;
  float scale_factor;  // KvShape's; what makes it differ from 1 is checked before
};

}  // namespace gyre::abi
