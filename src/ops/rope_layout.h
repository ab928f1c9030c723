#pragma once

#include <cstdint>
#include <span>

#include "abi/rope.h"
#include "gyre/rope.h"

namespace gyre {

// What the options mean for a head of a given size.
struct RopeLayout {
  uint32_t rotary_dim = 0;
  uint32_t pairs = 0;  // in all blocks
  uint32_t blocks = 1;
  uint32_t block_pairs = 0;
  uint32_t distance = 0;
  uint32_t block_stride = 0;
  uint32_t axes = 1;  // rows of positions
};

// Refuses what does not fit together; `op` opens the messages.
RopeLayout checked_rope_layout(const char* op, uint64_t head_dim, const RopeOptions& options);

// rope_table() for frequencies that double does not hold exactly enough at the far end of the
// positions.
Tensor exact_rope_table(const Device& device, std::span<const long double> radians_per_position);

// The frequencies of options.base, from the device's cache.
Tensor base_frequencies(DeviceImpl& device, uint64_t head_dim, const RopeOptions& options,
                        const RopeLayout& layout);

}  // namespace gyre
